"""Masks and jumps that grammars add to a step between its schedule and its launch.

A mask names the tokens that may be sampled; a jump commits tokens without sampling where the grammar leaves no choice.
A jump is part of the step that runs its tokens through the model: it begins when the managers receive the schedule, is
valid when the step is committed, and is undone if the step fails or its sequence is preempted before. So no pause,
abort or preemption finds a sequence between its jump and the forward that scores it.

    known tokens     | prompt | a | b | c |            c was sampled last: its row would run next
    jump             | prompt | a | b | cd | e |       c is rolled back, two tokens take its place
    rows of the step               | b | cd | e |      b again, whose logits score cd; e's are sampled from
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..completion import FinishReason
from ..grammars.jump import NO_JUMP, Jump
from ..grammars.jump_forward import cut_jump
from ..grammars.matcher import MAX_TOKEN_S
from ..grammars.state import GrammarState
from ..sequences.request import Request
from ..sequences.sequence import HOLDS_BLOCKS
from ..sequences.step import ScheduledSequence, ScheduleOutput, SequenceResult
from .parts import Parts

MAX_STEP_S = 1.0  # of processor time for the grammars of one step
HURRIED_S = 0.02  # for a token, once those of its step have taken so long


class GrammarSteps:
    """Add masks and jumps to steps, and end sequences whose grammar has ended. A part of the loop."""

    def __init__(self, parts: Parts) -> None:
        self._scheduler, self._managers, self._ledger = parts.scheduler, parts.managers, parts.ledger
        self._limits = parts.limits
        self._max_jump_blocks = parts.config.jump_forward_max_blocks  # KV blocks that one jump may take
        self._metrics, self._trace = parts.reports.metrics, parts.reports.trace
        self._seconds: dict[str, float] = {}  # processor time of each sequence's grammar since the last step
        self._spent_s = 0.0  # the sum of them
        self._last: dict[str, float] = {}  # that before it, where it was long

    def prepare(self, output: ScheduleOutput) -> ScheduleOutput:
        """Return the scheduled step with its masks and jumps. Changes the ledger, and preempts if a jump needs blocks.

        The managers learn of the changes from the returned schedule.
        """
        if not self._managers.engine.num_constrained:
            return output
        requests = self._managers.engine.requests_of(output.scheduled)
        started = time.perf_counter()
        draft = _Draft(requests, self._limits.max_num_batched_tokens - output.num_tokens)
        for item in output.scheduled:
            if item.id in draft.preempted:
                continue
            request = requests[item.id]
            draft.fixed.add(request)
            began = self._begin(request)
            draft.items[item.id] = item if request.grammar is None else self._constrain(item, request, draft)
            self._charge(request, began)
        self._metrics.grammar_seconds += time.perf_counter() - started
        return replace(
            output,
            scheduled=tuple(item for item in draft.items.values() if item.id not in draft.preempted),
            preempted=(*output.preempted, *draft.preempted),
        )

    def end(self, results: Sequence[SequenceResult]) -> None:
        """End the sequences of a committed step whose grammar allows no further token, not even a stop token."""
        engine = self._managers.engine
        if not engine.num_constrained:
            return
        for result in results:
            if result.token_id is None or result.id not in engine:
                continue
            request = engine.request(result.id)
            if result.jump:
                self._count(request, result.jump)
            if request.grammar is None or request.finish_reason is not None:
                continue
            started, began = time.perf_counter(), self._begin(request)
            request.grammar.follow(request.sequence.output_ids)
            if request.grammar.is_over:
                self._managers.finish(request.id, _why_over(request.grammar))
            self._charge(request, began)
            self._metrics.grammar_seconds += time.perf_counter() - started
        self._end_slow_ones([result.id for result in results if result.token_id is not None])

    def _begin(self, request: Request) -> float:
        """Limit the time of a sequence's next tokens by the step's time so far. Returns the thread's processor time."""
        if request.grammar is not None:
            was_slow = self._last.get(request.id, 0.0) > HURRIED_S
            hurried_s = 0.0 if was_slow else HURRIED_S
            request.grammar.limit(hurried_s if self._spent_s > MAX_STEP_S else MAX_TOKEN_S)
        return time.thread_time()

    def _charge(self, request: Request, began: float) -> None:
        """Add the thread's processor time since `began` to the sequence's."""
        if request.grammar is not None:
            seconds = time.thread_time() - began
            self._seconds[request.id] = self._seconds.get(request.id, 0.0) + seconds
            self._spent_s += seconds

    def _end_slow_ones(self, ids: Iterable[str]) -> None:
        """End those of a step's sequences whose grammar took too long, and the slowest if all together did.

        What a token of an ambiguous grammar costs grows with the text, so the step before a very long one is long too.
        """
        slowest = sorted(((id, self._seconds.pop(id, 0.0)) for id in ids), key=lambda pair: pair[1])
        total = sum(seconds for _, seconds in slowest)
        if len(self._seconds) > self._limits.max_num_seqs:  # of sequences that have ended otherwise
            self._seconds.clear()
        self._last = {id: seconds for id, seconds in slowest if seconds > HURRIED_S}
        self._spent_s, engine = 0.0, self._managers.engine
        for id, seconds in reversed(slowest):
            request = engine.request(id) if id in engine else None
            is_lost = request is not None and request.grammar is not None and request.grammar.is_lost
            if total <= MAX_STEP_S and seconds <= MAX_TOKEN_S and not is_lost:
                continue
            total -= seconds
            if request is not None and request.finish_reason is None:
                why = f"its grammar is too ambiguous: a token took {seconds:.2f} s of processor time"
                self._managers.finish(id, FinishReason("abort", message=why))

    def _constrain(self, item: ScheduledSequence, request: Request, draft: _Draft) -> ScheduledSequence:
        """Return this sequence's share of the step with its jump, if any, and the mask of the next token."""
        sequence, state = request.sequence, request.grammar
        assert state is not None
        is_sampled = item.start + item.num_tokens == sequence.num_tokens
        if not is_sampled or request.params.max_new_tokens == 0:
            return item
        output_ids = sequence.output_ids
        state.follow(output_ids)
        jump = self._plan(item, request, output_ids, draft)
        if jump:
            started = time.perf_counter()
            item = self._jump(item, request, jump, draft)
            if item.jump:
                output_ids = output_ids[: len(output_ids) - jump.num_rolled_back] + list(item.jump.token_ids)
            self._metrics.jump_forward_seconds += time.perf_counter() - started
        state.wants_retokenisation = state.mode == "text" and bool(item.jump) and item.jump.num_gained > 0
        state.follow(output_ids)
        mask = state.mask()
        assert mask.any(), f"{request.id} should have ended with its grammar"
        return item._replace(allowed=mask.tobytes())

    def _plan(self, item: ScheduledSequence, request: Request, output_ids: list[int], draft: _Draft) -> Jump:
        """Return the tokens that the grammar forces here, cut to the room of the step, the sequence and the model."""
        state, sequence = request.grammar, request.sequence
        assert state is not None
        if state.mode == "off":
            return NO_JUMP
        started = time.perf_counter()
        num_wanted = request.params.max_new_tokens - len(output_ids)
        num_left = min(num_wanted, self._limits.max_model_len - sequence.num_tokens)
        if state.mode == "exact":  # no more than a jump's blocks hold, see `_jump`
            num_held = (self._max_jump_blocks + 1) * self._ledger.block_size
            jump = state.plan_exact(min(num_left, draft.budget, num_held))
        else:
            self._metrics.num_retokenisations += state.wants_retokenisation
            jump = state.plan_text()
            back = jump.num_rolled_back
            if request.in_flight.num_steps and sequence.num_tokens - back - 1 < item.start:
                return NO_JUMP  # it would take back rows of an earlier chunk that is in flight
            # Rows from the last known states on run again too, if the module has recurrent layers.
            start = min(item.start, sequence.num_tokens - back - 1)
            again = self._ledger.first_row_after_roll_back(request, start) if back and self._ledger.states else start
            room = draft.budget - self._ledger.block_size - (start - again)
            jump = cut_jump(jump, output_ids, min(num_left + back, room), state.text)
        if jump:
            state.follow(output_ids[: len(output_ids) - jump.num_rolled_back] + list(jump.token_ids))
            if state.is_over:  # a step has to sample a token: the last one is sampled
                jump = cut_jump(jump, output_ids, len(jump.token_ids) - 1, state.text)
        self._metrics.jump_forward_seconds += time.perf_counter() - started
        return jump

    def _jump(self, item: ScheduledSequence, request: Request, jump: Jump, draft: _Draft) -> ScheduledSequence:
        """Return the share with the jump, cut to the free memory."""
        ledger, sequence, state = self._ledger, request.sequence, request.grammar
        assert state is not None
        first = sequence.num_tokens - jump.num_rolled_back
        table_size = len(ledger.block_table(request))
        most = (table_size + self._max_jump_blocks) * ledger.block_size - first
        jump = cut_jump(jump, sequence.token_ids, most, state.text)
        # Blocks that a rollback gives up may be pinned or held by other sequences: they are not counted as free.
        back_to = first - 1
        if ledger.states is not None:
            back_to = ledger.first_row_after_roll_back(request, min(item.start, back_to))
        num_given_up = max(table_size - back_to // ledger.block_size, 0) if jump.num_rolled_back else 0
        num_wanted = ledger.num_blocks_for(first + len(jump.token_ids)) - table_size + num_given_up
        if num_wanted > ledger.num_available:
            victims = self._scheduler.make_room_for_jump(request, num_wanted, draft.fixed)
            draft.preempted += [victim.id for victim in victims]
        num_blocks = min(num_wanted, ledger.num_available)
        jump = cut_jump(
            jump, sequence.token_ids, (table_size - num_given_up + num_blocks) * ledger.block_size - first, state.text
        )
        if not jump:
            return item
        num_kept = table_size - len(item.new_blocks)  # blocks that the managers know
        start = item.start
        if jump.num_rolled_back:
            start = ledger.roll_back(request, min(start, first - 1))
        table = ledger.block_table(request)
        num_kept = min(num_kept, len(table))
        end = first + len(jump.token_ids)
        assert ledger.grow(request, end) is not None, "room was made"
        draft.budget -= end - start - item.num_tokens
        self._trace.instant("jump_forward", id=request.id, tokens=len(jump.token_ids), rolled_back=jump.num_rolled_back)
        return item._replace(
            start=start, num_tokens=end - start, new_blocks=tuple(table[num_kept:]), jump=jump,
            num_blocks_kept=num_kept, states=ledger.plan_states(request, start, end),
        )  # fmt: skip

    def _count(self, request: Request, jump: Jump) -> None:
        """Count a committed jump, after the request has recorded the tokens of its step."""
        metrics, num_new = self._metrics, request.record.num_undelivered
        num_net = num_new - jump.num_rolled_back
        num_sampled = num_new > len(jump.token_ids)
        metrics.num_jumps += 1
        metrics.num_jump_forward_tokens += max(num_net - num_sampled, 0)
        metrics.num_forwards_saved += max(num_net - 1, 0)
        metrics.num_jump_rollbacks += jump.num_rolled_back > 0
        metrics.num_rolled_back_tokens += jump.num_rolled_back


class _Draft:
    """A step while masks and jumps are added to it."""

    def __init__(self, requests: dict[str, Request], budget: int) -> None:
        self.budget = budget  # rows that may still be added
        self.items: dict[str, ScheduledSequence] = {}
        # Requests that cannot be preempted: in `items`, or not known to the managers as holders of blocks yet.
        self.fixed = {r for r in requests.values() if r.sequence.state not in HOLDS_BLOCKS}
        self.preempted: list[str] = []


def _why_over(state: GrammarState) -> FinishReason:
    if state.is_complete:
        return FinishReason("stop")
    return FinishReason("abort", message="no token of this vocabulary goes on as the grammar wants it")
