"""Several decode steps from one schedule, with which the host's work around a step is done once for all of them.

The field calls it multi-step scheduling. Between two of the steps only the drawn tokens move, to the inputs of the
next. So it is for sequences that need nothing of the host meanwhile: no stop string, no grammar, no caller that wants
each token. The steps end early where a sequence ends, or where anything waits for the engine: a command, a request, a
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..kv.ledger import KVLedger
from ..sequences.engine_manager import EngineSequenceManager
from ..sequences.request import Request
from ..sequences.step import ScheduledSequence, ScheduleOutput
from .scheduler import StepLimits


class MultiStep:
    """Decide how many decode steps a schedule holds. It takes KV blocks for all of them, as for a draft."""

    def __init__(
        self,
        ledger: KVLedger,
        limits: StepLimits,
        sequences: EngineSequenceManager,
        wants_tokens: Callable[[Request], bool],
    ) -> None:
        """Create it. wants_tokens: whether a request's caller is given its tokens before its answer."""
        self._ledger, self._limits, self._sequences = ledger, limits, sequences
        self._wants_tokens = wants_tokens

    def plan(self, output: ScheduleOutput, most: int, *, may_evict: bool) -> ScheduleOutput:
        """Return the schedule with up to `most` steps; it is the same one where only one can run.

        may_evict: whether cached blocks may be taken. Changes the ledger: the managers learn of the blocks from the
        schedule, and what was taken in vain is given back at the commit.
        """
        if output.has_drafts or output.num_rows != len(output.scheduled):
            return output
        requests = self._sequences.requests_of(output.scheduled)
        stop_ids: dict[int, frozenset[int]] = {}  # by their own ids: samples of a prompt have the same
        for item in output.scheduled:
            most = min(most, self._most(item, requests[item.id], stop_ids))
            if most < 2:
                return output
        ends = [(requests[item.id], item.start) for item in output.scheduled]
        num_free = self._ledger.num_available if may_evict else self._ledger.usage.num_free
        num_spare = num_free - len(ends)  # one is left for each sequence
        while (num_missing := self._num_missing(ends, most)) and num_missing > num_spare:
            most -= 1
        if most < 2:
            return output
        items = []
        for item, (request, start) in zip(output.scheduled, ends, strict=True):
            new_blocks = self._ledger.grow(request, start + most)
            assert new_blocks is not None, request
            items.append(item._replace(new_blocks=(*item.new_blocks, *new_blocks)) if new_blocks else item)
        return replace(output, scheduled=tuple(items), num_steps=most, stop_ids=frozenset().union(*stop_ids.values()))

    def _num_missing(self, ends: list[tuple[Request, int]], most: int) -> int:
        """Count the blocks that so many steps need beyond those of the first one. ends: requests, and the positions of
        their rows in the first step."""
        return sum(max(self._ledger.num_missing(request, start + most), 0) for request, start in ends)

    def _most(self, item: ScheduledSequence, request: Request, stop_ids: dict[int, frozenset[int]]) -> int:
        """Return how many steps the sequence may have one after another, and add its stop tokens to `stop_ids`."""
        sequence, params = request.sequence, request.params
        num_known = len(sequence.token_ids)
        is_decode = item.start + 1 == num_known > sequence.num_prompt_tokens
        if not is_decode or item.states is not None or not request.draws_alone or self._wants_tokens(request):
            return 1
        for ids in (params.stop_ids, *(() if params.ignore_eos else (self._sequences.eos_token_ids,))):
            stop_ids[id(ids)] = ids
        left = params.max_new_tokens - (num_known - sequence.num_prompt_tokens)
        return min(left, self._limits.max_model_len - num_known)
