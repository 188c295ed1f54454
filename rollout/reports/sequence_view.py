"""A report of one live sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..completion import WeightSpan
from ..sequences.request import Request


@dataclass(frozen=True)
class SequenceView:
    """One live sequence at one moment."""

    id: str
    base_id: str  # of the request that this is a sample of
    state: str  # sequence.State, by its value
    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was in the cache
    num_tokens_processed: int  # known tokens that have KV
    num_drafted_tokens: int  # rows for tokens that might have come next
    num_accepted_tokens: int  # of those tokens, the ones that did: each saved a step
    why_no_draft: str | None  # in the newest step, by a name in `NoDraft`; None: it had one, or waits
    num_retractions: int
    age_s: float  # since its arrival
    newest_ids: tuple[int, ...]  # the last tokens of prompt and output together
    weight_versions: tuple[WeightSpan, ...]  # contiguous over the output


def views(
    running: Sequence[Request], waiting: Sequence[Request], num_newest: int, limit: int | None,
    why_none: Callable[[Request], str | None],
) -> list[SequenceView]:  # fmt: skip
    """Show `limit` at most of those that run, then of those that wait, with at most `num_newest` of their tokens each.

    Changes nothing. why_none: why one that runs has no draft. Raises ValueError for a negative number.
    """
    if num_newest < 0 or (limit is not None and limit < 0):
        raise ValueError(f"num_newest and limit must not be negative, not {num_newest} and {limit}")
    return [*(view(request, num_newest, why_none(request)) for request in running[:limit]),
            *(view(request, num_newest, None) for request in waiting[:limit])]  # fmt: skip


def view(request: Request, num_newest: int, why_no_draft: str | None) -> SequenceView:
    """Return the sequence's present state, with at most `num_newest` of its newest tokens. Changes nothing."""
    sequence = request.sequence
    return SequenceView(
        id=request.id,
        base_id=request.base_id,
        state=sequence.state.value,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        max_new_tokens=request.params.max_new_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_tokens_processed=sequence.num_tokens_step_processed,
        num_drafted_tokens=sum(counts.num_drafted_tokens for counts in request.record.drafts.values()),
        num_accepted_tokens=sum(counts.num_accepted_tokens for counts in request.record.drafts.values()),
        why_no_draft=why_no_draft,
        num_retractions=request.num_retractions,
        age_s=time.monotonic() - request.arrival_time,
        newest_ids=tuple(sequence.token_ids[max(0, len(sequence.token_ids) - num_newest) :]),
        weight_versions=tuple(request.record.spans),
    )
