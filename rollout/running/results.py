"""The results of a step, computed from its logits: sampled tokens, and log-probabilities of prompts and of jumps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling.parts import DrawnRows
from ..completion import ListedLogprobs, TopLogprobs
from ..sequences.request import Request
from ..sequences.step import ScheduledSequence, ScheduleOutput, SequenceResult
from .batch import Batch, KnownRows
from .sampler import Sampled, Sampler, prompt_listed_logprobs, prompt_logprobs, refuse_broken


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the tokens that follow some rows."""

    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    listed_logprobs: tuple[ListedLogprobs, ...] = ()


def results_of(
    output: ScheduleOutput, batch: Batch, logits: Tensor | DrawnRows, sampler: Sampler
) -> list[SequenceResult]:
    """Return one result per scheduled sequence, in order, from logits [rows, V] of `batch.logit_rows`, or from the
    tokens drawn from these rows.

    Raises BrokenLogits.
    """
    if isinstance(logits, DrawnRows):
        refuse_broken(batch.sampled, logits.logprobs)
        rows = zip(batch.sampled, logits.token_ids, logits.logprobs, strict=True)
        drawn = {request.id: Sampled(token_id, logprob, ()) for request, token_id, logprob in rows}
        return [_result(item, drawn.get(item.id), None, None) for item in output.scheduled]
    if batch.is_decode:
        choices = sampler.sample(logits, batch.sampled, batch.allowed)
        return [
            SequenceResult(
                item.id, item.incarnation, 1, sampled.token_id, sampled.logprob, sampled.top_logprobs, (), (),
                sampled.listed_logprobs, (), sampled.masked_prob, sampled.was_only_choice,
            )
            for item, sampled in zip(output.scheduled, choices, strict=True)
        ]  # fmt: skip
    sampled = _sample(batch, logits, sampler)
    if not batch.prompts and not batch.jumps:
        return [_result(item, sampled.get(item.id), None, None) for item in output.scheduled]
    first_jump = len(batch.sampled) + sum(len(rows.token_ids) for rows in batch.prompts)
    prompts = _score(batch.prompts, logits[len(batch.sampled) :])
    jumps = _score(batch.jumps, logits[first_jump:])
    return [_result(i, sampled.get(i.id), prompts.get(i.id), jumps.get(i.id)) for i in output.scheduled]


def drawn_results(
    items: Sequence[ScheduledSequence], requests: Mapping[str, Request], token_ids: list[int], logprobs: list[float]
) -> list[SequenceResult]:
    """Return one result per row of a decode step that drew all tokens itself. Raises BrokenLogits."""
    refuse_broken([requests[item.id] for item in items], logprobs)
    return [
        SequenceResult(item.id, item.incarnation, 1, token_id, logprob)
        for item, token_id, logprob in zip(items, token_ids, logprobs, strict=True)
    ]


def _sample(batch: Batch, logits: Tensor, sampler: Sampler) -> dict[str, Sampled]:
    if not batch.sampled:
        return {}
    choices = sampler.sample(logits[: len(batch.sampled)], batch.sampled, batch.allowed)
    return {request.id: choice for request, choice in zip(batch.sampled, choices, strict=True)}


def _score(known: Iterable[KnownRows], logits: Tensor) -> dict[str, Scores]:
    """Score known tokens; returns scores by sequence. logits [rows, V]: of these rows, one after another."""
    scored, first = {}, 0
    for rows in known:
        ids = torch.tensor(rows.token_ids, device=logits.device)
        its_logits = logits[first : first + len(rows.token_ids)]
        scored[rows.request.id] = Scores(
            *prompt_logprobs(its_logits, ids, rows.request), prompt_listed_logprobs(its_logits, rows.request)
        )
        first += len(rows.token_ids)
    return scored


def _result(
    item: ScheduledSequence, sampled: Sampled | None, prompt: Scores | None, jump: Scores | None
) -> SequenceResult:
    scores, jumped = prompt or Scores(), jump or Scores()
    result = SequenceResult(
        item.id,
        item.incarnation,
        item.num_tokens,
        prompt_logprobs=scores.logprobs,
        prompt_top_logprobs=scores.top_logprobs,
        prompt_listed_logprobs=scores.listed_logprobs,
        jump_logprobs=jumped.logprobs,
        jump_top_logprobs=jumped.top_logprobs,
        jump_listed_logprobs=jumped.listed_logprobs,
    )
    if sampled is None:
        return result
    return result._replace(
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top_logprobs=sampled.top_logprobs,
        listed_logprobs=sampled.listed_logprobs,
        masked_prob=sampled.masked_prob,
        was_only_choice=sampled.was_only_choice,
    )
