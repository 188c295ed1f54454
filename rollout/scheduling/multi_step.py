"""Several decode steps from one schedule, with which the host's work around a step is done once for all of them.

The field calls it multi-step scheduling. Between two of the steps only the drawn tokens move, to the inputs of the
next. So it is for sequences that need nothing of the host meanwhile: no text, no grammar, no caller that wants each
token. The steps end early where a sequence ends, or where anything waits for the engine: a command, a request, or a
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
        stop_ids: set[int] = set()
        for item in output.scheduled:
            most = min(most, self._most(item, requests[item.id], stop_ids))
            if most < 2:
                return output
        tables = [self._ledger.block_table(requests[item.id]) for item in output.scheduled]
        num_blocks = list(map(len, tables))
        for item in output.scheduled:
            request, num_known = requests[item.id], item.start + 1
            most = 1 + self._ledger.plan_draft(request, num_known, most - 1, may_evict=may_evict)
            if most < 2:
                break
        if most < 2:
            for item in output.scheduled:
                self._ledger.settle_draft(requests[item.id], item.start + 1, 0)
            return output
        items = [
            item if len(table) == num else item._replace(new_blocks=(*item.new_blocks, *table[num:]))
            for item, table, num in zip(output.scheduled, tables, num_blocks, strict=True)
        ]
        return replace(output, scheduled=tuple(items), num_steps=most, stop_ids=frozenset(stop_ids))

    def _most(self, item: ScheduledSequence, request: Request, stop_ids: set[int]) -> int:
        """Return how many steps the sequence may have one after another, and add its stop tokens to `stop_ids`."""
        sequence, params = request.sequence, request.params
        num_known = len(sequence.token_ids)
        is_decode = item.start + 1 == num_known > sequence.num_prompt_tokens
        if not is_decode or item.states is not None or not request.draws_alone or self._wants_tokens(request):
            return 1
        stop_ids.update(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self._sequences.eos_token_ids)
        left = params.max_new_tokens - (num_known - sequence.num_prompt_tokens)
        return min(left, self._limits.max_model_len - num_known)
