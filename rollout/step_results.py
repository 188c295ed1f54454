"""What a step gives back, from its logits: the tokens sampled, and log-probabilities of prompts to be scored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch import Batch
from .completion import ListedLogprobs, TopLogprobs
from .sampler import Sampled, Sampler, prompt_listed_logprobs, prompt_logprobs
from .schedule import ScheduledSequence, ScheduleOutput, SequenceResult


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the prompt tokens that follow the rows asked for."""

    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    listed_logprobs: tuple[ListedLogprobs, ...] = ()


def results_of(output: ScheduleOutput, batch: Batch, logits: Tensor, sampler: Sampler) -> list[SequenceResult]:
    """One result per scheduled sequence, in order; logits [rows, V] of `batch.logit_rows`. Raises BrokenLogits."""
    sampled = _sample(batch, logits, sampler)
    scored = _score_prompts(batch, logits)
    return [_result(item, sampled.get(item.id), scored.get(item.id)) for item in output.scheduled]


def _sample(batch: Batch, logits: Tensor, sampler: Sampler) -> dict[str, Sampled]:
    if not batch.sampled:
        return {}
    choices = sampler.sample(logits[: len(batch.sampled)], batch.sampled)
    return {request.id: choice for request, choice in zip(batch.sampled, choices, strict=True)}


def _score_prompts(batch: Batch, logits: Tensor) -> dict[str, PromptScores]:
    scored, first = {}, len(batch.sampled)
    for rows in batch.prompts:
        token_ids = rows.request.sequence.token_ids[rows.first_token : rows.first_token + rows.num_rows]
        ids = torch.tensor(token_ids, device=logits.device)
        its_logits = logits[first : first + rows.num_rows]
        scored[rows.request.id] = PromptScores(
            *prompt_logprobs(its_logits, ids, rows.request), prompt_listed_logprobs(its_logits, rows.request)
        )
        first += rows.num_rows
    return scored


def _result(item: ScheduledSequence, sampled: Sampled | None, scored: PromptScores | None) -> SequenceResult:
    scores = scored or PromptScores()
    result = SequenceResult(
        item.id,
        item.incarnation,
        item.num_tokens,
        prompt_logprobs=scores.logprobs,
        prompt_top_logprobs=scores.top_logprobs,
        prompt_listed_logprobs=scores.listed_logprobs,
    )
    if sampled is None:
        return result
    return replace(
        result,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top_logprobs=sampled.top_logprobs,
        listed_logprobs=sampled.listed_logprobs,
    )
