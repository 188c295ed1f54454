"""Masks and jumps that grammars add to a step between its schedule and its launch.

A mask names the tokens that may be sampled; a jump makes tokens known without sampling, where the grammar leaves no
choice. Its tokens follow from the sequence and the settings alone. The rows and blocks that other sequences leave free
decide only how many steps run its rows:

    known tokens     | prompt | a | b | c |            c was sampled last: its row would run next
    jump             | prompt | a | b | cd | e |       c is rolled back, two tokens take its place
    rows to run                    | b | cd | e |      b again, whose logits score cd; e's are sampled from

The first step has as many of these rows as there is room for. The scheduler plans the others like a prompt's chunks,
and waits or preempts for their blocks. The jump is settled with the token that is sampled after its last row. Until
then it is no part of the output, and it is undone if its sequence ends or is preempted, or if a step fails. A preempted
sequence plans the same jump again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from ..completion import FinishReason
from ..grammars.jump import NO_JUMP, Jump
from ..grammars.matcher import allows
from ..grammars.processor_time import thread_time
from ..grammars.state import GrammarState
from ..sequences.request import Request
from ..sequences.sequence import HOLDS_BLOCKS, Sequence
from ..sequences.step import ScheduledSequence, ScheduleOutput, SequenceResult
from .grammar_time import HURRIED_S, GrammarTime
from .parts import Parts

LOOK_AHEAD_S = 0.05  # of processor time, for the grammars of one step to follow drafts


class GrammarSteps:
    """Add masks and jumps to steps, and end sequences whose grammar has ended. A part of the loop."""

    def __init__(self, parts: Parts) -> None:
        self._scheduler, self._managers, self._ledger = parts.scheduler, parts.managers, parts.ledger
        self._limits = parts.limits
        self._max_jump_blocks = parts.config.jump_forward_max_blocks  # KV blocks that one jump may take
        self._metrics, self._trace = parts.reports.metrics, parts.reports.trace
        self._time = GrammarTime()
        self._look_ahead_s = 0.0  # processor time that drafts of this step may still take

    def prepare(self, output: ScheduleOutput) -> ScheduleOutput:
        """Return the scheduled step with its masks and jumps. Changes the ledger, and the queues where a request waits:
        for room for its jump, or for a step whose grammars take less time.

        The managers learn of the changes from the returned schedule.
        """
        if not self._managers.engine.num_constrained:
            return output
        started = time.perf_counter()
        self._look_ahead_s = LOOK_AHEAD_S
        # A step with an image that has to be whole may be larger than the limit.
        draft = _Draft(max(self._scheduler.row_limit.now - output.num_rows, 0))
        for item in output.scheduled:
            request = self._managers.engine.request(item.id)
            if request.grammar is None or not _is_sampled(item, request):
                draft.items.append(item)
                continue
            if self._time.is_spent and request.grammar.nests:  # a mask of it may take long: not in this step
                share = None
            else:
                with self._time.charged(request):
                    share = self._constrain(item, request, draft)
            if share is not None:
                draft.items.append(share)
                continue
            if request.sequence.state in HOLDS_BLOCKS:  # else the managers do not know that it was admitted
                draft.preempted.append(request.id)
            self._scheduler.retract(request)
        self._metrics.grammar_seconds += time.perf_counter() - started
        return replace(output, scheduled=tuple(draft.items), preempted=(*output.preempted, *draft.preempted))

    def constrain_draft(
        self, request: Request, token_ids: SequenceOf[int]
    ) -> tuple[tuple[int, ...], tuple[bytes | None, ...]]:
        """Return the first tokens of a draft that the request's grammar allows, and the mask behind each.

        They end before a token after which a jump would begin or the grammar ends: no token is drawn there. The state
        stands behind the sequence's tokens, and does so again afterwards.
        """
        state, kept, masks = request.grammar, list[int](), list[bytes | None]()
        assert state is not None
        if state.is_lost:
            return (), ()
        num_output, began = request.sequence.num_output_tokens, thread_time()
        with state.looking_ahead(HURRIED_S):
            for id in token_ids:
                if thread_time() - began > self._look_ahead_s or not allows(state.mask(), id):
                    break
                state.follow([*kept, id], num_output)
                if state.is_over or self._plan(request, state, num_ahead=len(kept) + 1) or state.is_lost:
                    break
                mask = state.mask()
                kept.append(id)
                masks.append(mask.tobytes())
        self._look_ahead_s -= thread_time() - began
        return tuple(kept), tuple(masks)

    def forget_time(self) -> None:
        """Forget the time that the grammars of a failed step have taken."""
        self._time.forget_step()

    def end(self, results: SequenceOf[SequenceResult]) -> None:
        """End the sequences of a committed step whose grammar allows no further token, not even a stop token."""
        engine = self._managers.engine
        if not engine.num_constrained:
            return
        for result in results:
            if result.token_id is None or result.id not in engine:
                continue
            request = engine.request(result.id)
            if request.grammar is None:
                continue
            if request.record.newest_jump:
                self._count(request)
            if request.finish_reason is not None:
                continue
            started = time.perf_counter()
            with self._time.charged(request):
                follow_output(request.grammar, request.sequence)
                if request.grammar.is_over:
                    self._managers.finish(request.id, _why_over(request.grammar))
            self._metrics.grammar_seconds += time.perf_counter() - started
        self._end_slow_ones([result.id for result in results if result.token_id is not None])

    def _end_slow_ones(self, ids: list[str]) -> None:
        """End those of a step's sequences whose grammar took too long, and the slowest if all together did.

        A grammar that does not nest is ended at its second long token: one may be the machine's, which gave its
        processor to others meanwhile.
        """
        engine = self._managers.engine
        for id, seconds, num_long in self._time.end_step(ids, self._limits.max_num_seqs):
            request = engine.request(id) if id in engine else None
            if request is None or (grammar := request.grammar) is None or request.finish_reason is not None:
                continue
            if num_long > (0 if grammar.nests else 1) or grammar.is_lost:
                why = f"its grammar is too ambiguous: a token took {seconds:.2f} s of processor time"
                self._managers.finish(id, FinishReason("abort", message=why, by_engine=True))

    def _constrain(self, item: ScheduledSequence, request: Request, draft: _Draft) -> ScheduledSequence | None:
        """Return this sequence's share of the step: with its jump, if one begins here, and with the mask of the next
        token, if the step samples it. Returns None if the sequence has to wait for blocks."""
        sequence, state = request.sequence, request.grammar
        assert state is not None
        follow_output(state, sequence)
        if sequence.jump_start is None:
            started = time.perf_counter()
            jump = self._plan(request, state)
            share = self._begin(item, request, jump, draft) if jump else item
            self._metrics.jump_forward_seconds += time.perf_counter() - started
            if share is None or share.start + share.num_tokens < _num_known(request, jump):
                return share
            item = share
        mask = state.mask()
        assert mask.any(), f"{request.id} should have ended with its grammar"
        return item._replace(allowed=mask.tobytes())

    def _plan(self, request: Request, state: GrammarState, num_ahead: int = 0) -> Jump:
        """Return the jump after the sequence's tokens, and after `num_ahead` of a draft. Moves the state behind it.

        It follows from the sequence, its settings and the engine's, never from other sequences or the moment.
        """
        if state.mode == "off":
            return NO_JUMP
        sequence, ledger = request.sequence, self._ledger
        num_blocks = ledger.num_blocks_for(sequence.num_tokens + num_ahead) + self._max_jump_blocks
        most = min(min(num_blocks, ledger.num_blocks) * ledger.block_size, self._limits.max_model_len)
        max_output = min(request.params.max_new_tokens, most - sequence.num_prompt_tokens)
        follows_jump = request.record.newest_jump.num_gained > 0 and num_ahead == 0
        self._metrics.num_retokenisations += follows_jump and state.mode == "text"
        return state.plan(max_output, follows_jump=follows_jump)

    def _begin(self, item: ScheduledSequence, request: Request, jump: Jump, draft: _Draft) -> ScheduledSequence | None:
        """Return the share with the jump, and with as many of its rows as the step and the free blocks hold.

        Returns None where there is no block for the first of them: a rollback may give up blocks that pins or other
        sequences keep.
        """
        ledger, sequence = self._ledger, request.sequence
        table = ledger.block_table(request)
        num_kept = len(table) - len(item.new_blocks)  # blocks that the managers know
        start = item.start
        if jump.num_rolled_back:
            start = ledger.roll_back(request, min(start, sequence.num_tokens - jump.num_rolled_back - 1))
            num_kept = min(num_kept, len(table))
            request.record.cut_kept_kv(start)
        num_room = min(item.num_tokens + draft.budget, self._limits.chunked_prefill_size)
        num_rows = min(_num_known(request, jump) - start, num_room)
        num_rows = self._scheduler.grow_up_to(request, start + num_rows) - start
        if num_rows <= 0:
            return None
        draft.budget -= num_rows - item.num_tokens
        self._trace.instant("jump_forward", id=request.id, tokens=len(jump.token_ids), rolled_back=jump.num_rolled_back)
        return item._replace(
            start=start, num_tokens=num_rows, new_blocks=tuple(table[num_kept:]), jump=jump,
            num_blocks_kept=num_kept, states=ledger.plan_states(request, start, start + num_rows),
        )  # fmt: skip

    def _count(self, request: Request) -> None:
        """Count the jump that the newest token settled."""
        metrics, record = self._metrics, request.record
        jump, num_new = record.newest_jump, record.num_undelivered
        num_net = num_new - jump.num_rolled_back
        num_sampled = num_new > len(jump.token_ids)
        metrics.num_jumps += 1
        metrics.num_jump_forward_tokens += max(num_net - num_sampled, 0)
        metrics.num_forwards_saved += max(num_net - record.newest_jump_steps, 0)
        metrics.num_jump_rollbacks += jump.num_rolled_back > 0
        metrics.num_rolled_back_tokens += jump.num_rolled_back


@dataclass
class _Draft:
    """A step while masks and jumps are added to it."""

    budget: int  # rows that may still be added
    items: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


def follow_output(state: GrammarState, sequence: Sequence) -> None:
    """Move the state of a sequence behind its output. Reads only the tokens that either may have changed since the last
    call: the cost of a token does not grow with the output."""
    num_prompt = sequence.num_prompt_tokens
    start = min(state.num_kept, sequence.num_tokens_kept - num_prompt)
    state.follow(sequence.token_ids[num_prompt + start :], start)
    state.num_kept, sequence.num_tokens_kept = sequence.num_output_tokens, sequence.num_tokens


def _is_sampled(item: ScheduledSequence, request: Request) -> bool:
    """Return whether the share, without a jump, ends with the last known token, after which one is sampled."""
    return item.start + item.num_tokens == request.sequence.num_tokens and request.params.max_new_tokens > 0


def _num_known(request: Request, jump: Jump) -> int:
    """Count the sequence's known tokens once this jump has begun."""
    return request.sequence.num_tokens - jump.num_rolled_back + len(jump.token_ids)


def _why_over(state: GrammarState) -> FinishReason:
    if state.is_complete:
        return FinishReason("stop")
    why = "no token of this vocabulary goes on as the grammar wants it"
    return FinishReason("abort", message=why, by_engine=True)
