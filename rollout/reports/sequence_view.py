"""A live sequence as something to look at."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..completion import WeightSpan
from ..sequences.request import Request


@dataclass(frozen=True)
class SequenceView:
    """One live sequence at one moment."""

    id: str
    base_id: str  # of the request whose sample this is
    state: str  # sequence.State, by its value
    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was there already
    num_tokens_processed: int  # of all that are known: those that have KV
    num_retractions: int
    age_s: float  # since it arrived
    newest_ids: tuple[int, ...]  # the last tokens of prompt and output together
    weight_versions: tuple[WeightSpan, ...]  # contiguous over the output


def view(request: Request, num_newest: int) -> SequenceView:
    """As it stands now, with at most that many of its newest tokens. Changes nothing."""
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
        num_retractions=request.num_retractions,
        age_s=time.monotonic() - request.arrival_time,
        newest_ids=tuple(sequence.token_ids[max(0, len(sequence.token_ids) - num_newest) :]),
        weight_versions=tuple(request.record.spans),
    )
