"""The results of a step, computed from its logits: sampled tokens, and log-probabilities of prompts and of jumps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling.parts import DrawnRows
from ..completion import ListedLogprobs, TopLogprobs
from ..sequences.step import NewToken, ScheduledSequence, ScheduleOutput, SequenceResult
from .batch import Batch, KnownRows
from .decode_buffers import Drawn
from .sampler import Sampled, Sampler, known_temperature, prompt_listed_logprobs, prompt_logprobs, refuse_broken


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
    items, num_sampled = output.scheduled, len(batch.sampled)
    if isinstance(logits, DrawnRows):
        choices = [Sampled(*row, ()) for row in zip(logits.token_ids.tolist(), logits.logprobs.tolist(), strict=True)]
    else:
        choices = sampler.sample(logits[:num_sampled], batch.sampled, batch.allowed) if num_sampled else []
    if batch.is_decode:
        return _drawn(items, choices)
    sampled_ids = {row.request.id for row in batch.sampled}
    drawn = {result.id: result for result in _drawn([item for item in items if item.id in sampled_ids], choices)}
    if not batch.prompts and not batch.jumps:
        return [_result(item, drawn.get(item.id), None, None) for item in items]
    assert isinstance(logits, Tensor)
    first_jump = num_sampled + sum(len(rows.token_ids) for rows in batch.prompts)
    prompts = _score(batch.prompts, logits[num_sampled:], of_prompts=True)
    jumps = _score(batch.jumps, logits[first_jump:], of_prompts=False)
    return [_result(i, drawn.get(i.id), prompts.get(i.id), jumps.get(i.id)) for i in items]


def drawn_results(
    items: Sequence[ScheduledSequence], token_ids: Sequence[int], logprobs: Sequence[float]
) -> list[SequenceResult]:
    """Return the results of a decode step that drew all tokens itself: one row per item, and per token of its draft.
    Raises BrokenLogits."""
    if len(token_ids) == len(items):  # no drafts: the usual step, with fewer values
        if (total := sum(logprobs)) != total:  # one of them is NaN
            refuse_broken([item.id for item in items], logprobs)
        return [
            SequenceResult(item.id, item.incarnation, 1, token_id, logprob)
            for item, token_id, logprob in zip(items, token_ids, logprobs, strict=True)
        ]
    return _drawn(items, [Sampled(*row, ()) for row in zip(token_ids, logprobs, strict=True)])


def results_of_several(items: Sequence[ScheduledSequence], steps: Sequence[Drawn]) -> list[SequenceResult]:
    """Return the results of decode steps that followed one another, each with one row per item: all tokens but the
    last step's count as accepted. Raises BrokenLogits."""
    *before, last = steps
    results = drawn_results(items, *last)
    for row, result in enumerate(results):
        new = [NewToken(ids[row], logprobs[row], (), (), False, False, None) for ids, logprobs in before]
        results[row] = result._replace(accepted=tuple(new))
    return results


def _drawn(items: Sequence[ScheduledSequence], choices: Sequence[Sampled]) -> list[SequenceResult]:
    """Return the results of shares that are drawn from. choices: of all their rows, one after another.

    Raises BrokenLogits for a token that the sequence would take: rows behind a rejected token say nothing.
    """
    results, row = [], 0
    for item in items:
        drafted = item.draft.token_ids
        num_accepted = 0
        while num_accepted < len(drafted) and choices[row + num_accepted].token_id == drafted[num_accepted]:
            num_accepted += 1
        accepted = tuple([NewToken(*c[:4], False, c.was_only_choice, c.masked_prob, c.kept_ids)
                          for c in choices[row : row + num_accepted]])  # fmt: skip
        last = choices[row + num_accepted]
        results.append(SequenceResult(
            item.id, item.incarnation, item.num_tokens, last.token_id, last.logprob, last.top_logprobs, (), (),
            last.listed_logprobs, (), last.masked_prob, last.was_only_choice, accepted=accepted, kept_ids=last.kept_ids,
        ))  # fmt: skip
        row += 1 + len(drafted)
    logprobs = [(r.id, new.logprob) for r in results for new in r.accepted] + [(r.id, r.logprob) for r in results]
    refuse_broken([id for id, _ in logprobs], [logprob for _, logprob in logprobs])
    return results


def _score(known: Iterable[KnownRows], logits: Tensor, *, of_prompts: bool) -> dict[str, Scores]:
    """Score known tokens; returns scores by sequence. logits [rows, V]: of these rows, one after another."""
    scored, first = {}, 0
    for rows in known:
        ids = torch.tensor(rows.token_ids, device=logits.device)
        its_logits = logits[first : first + len(rows.token_ids)]
        divisor = known_temperature(rows.request, of_prompt=of_prompts)
        scored[rows.request.id] = Scores(
            *prompt_logprobs(its_logits, ids, rows.request, divisor),
            prompt_listed_logprobs(its_logits, rows.request, divisor),
        )
        first += len(rows.token_ids)
    return scored


def _result(
    item: ScheduledSequence, drawn: SequenceResult | None, prompt: Scores | None, jump: Scores | None
) -> SequenceResult:
    scores, jumped = prompt or Scores(), jump or Scores()
    result = drawn or SequenceResult(item.id, item.incarnation, item.num_tokens)
    return result._replace(
        prompt_logprobs=scores.logprobs,
        prompt_top_logprobs=scores.top_logprobs,
        prompt_listed_logprobs=scores.listed_logprobs,
        jump_logprobs=jumped.logprobs,
        jump_top_logprobs=jumped.top_logprobs,
        jump_listed_logprobs=jumped.listed_logprobs,
    )
