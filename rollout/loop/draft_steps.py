"""Drafts that are added to a step between its schedule and its launch, and what comes of them at its commit.

    known tokens     | prompt | a | b |            b was sampled last: its row would run next
    draft            | prompt | a | b | c | d |    rows for b, c and d: each draws the token behind it
    drawn                             | c | x | y  c is accepted; x is what follows it, and y is thrown away

A draft takes rows and blocks that no other sequence wants in this step. What it took in vain is given back when the
step is committed, before another one is scheduled.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..sequences.request import Request
from ..sequences.step import Draft, ScheduledSequence, ScheduleOutput, SequenceResult
from ..speculation.lengths import StepSize
from ..speculation.no_draft import NoDraft
from ..speculation.speculation import Planned, Wanted
from .grammar_steps import GrammarSteps
from .parts import Parts

MAX_IN_FLIGHT = 64  # steps: more than there are stages
_MANY = 1 << 16  # steps
EARLIER = "earlier"  # the source of the tokens of an earlier answer, which are not guesses: all are drawn again


class DraftSteps:
    """Add drafts to steps. A part of the loop."""

    def __init__(self, parts: Parts, grammars: GrammarSteps) -> None:
        self._speculation, self._grammars = parts.speculation, grammars
        self._scheduler, self._managers, self._ledger = parts.scheduler, parts.managers, parts.ledger
        self._limits, self._metrics = parts.limits, parts.reports.metrics
        self._trace = parts.reports.trace
        # Steps in flight: size without drafts, sequences that sources were asked for, seconds.
        self._planned: dict[int, tuple[StepSize, int, float]] = {}
        self._verified: set[Request] = set()  # whose earlier answer has tokens that were not drawn again yet
        self._shares: dict[int, float] = {}  # of steps in flight: share of their rows that verify earlier answers
        self._num_accepted = 0  # in the newest committed step
        self.num_without = 1  # steps from the newest prepared one on that have no drafts, whatever they draw
        # Steps that are planned before this one is committed need slots of states and blocks: each of them at most one
        # slot a sequence, and the blocks of its rows, with one more for each sequence whose rows begin inside a block.
        num_ahead, limits = parts.runner.num_stages - 1, parts.limits
        num_blocks = parts.ledger.num_blocks_for(limits.max_num_batched_tokens) + limits.max_num_seqs
        self._num_slots_reserved, self._num_blocks_reserved = num_ahead * limits.max_num_seqs, num_ahead * num_blocks

    @property
    def may_draft(self) -> bool:
        """Whether the next step may have drafts."""
        return bool(self._verified) or (self._speculation is not None and self._speculation.may_draft)

    def prepare(self, output: ScheduleOutput) -> ScheduleOutput:
        """Return the scheduled step with its drafts. Changes the ledger; the managers learn of it from the schedule."""
        speculation, self.num_without = self._speculation, 1
        if self._verified:
            scheduled = {item.id for item in output.scheduled}  # not all that verify: thousands may wait
            verified = {id for id in scheduled if self._managers.engine.request(id) in self._verified}
            if (verifying := self._verify(output)).has_drafts:  # no rows are left for guesses
                self._note_share(verifying, verified)
                return verifying
        if speculation is None or not speculation.is_used:
            self.num_without = 1 if self._verified else _MANY
            return output
        started = time.perf_counter()
        size = StepSize(output.num_rows, len(output.scheduled))
        if (why := speculation.why_none(size)) is not None:
            speculation.reasons.begin(why, len(output.scheduled))
            if why is NoDraft.RESTING and not self._verified:
                self.num_without = speculation.num_resting
            return output
        wanted, places = self._wanted(output, speculation.most_asked(len(output.scheduled)))
        budget = self._scheduler.row_limit.now - output.num_rows
        items = list(output.scheduled)
        for index, one, planned in zip(places, wanted, speculation.plan(wanted, size, budget), strict=True):
            if isinstance(planned, Planned):
                items[index] = self._with_draft(items[index], one.request, planned)
            else:
                speculation.reasons.note(one.request, planned)
        planning_s = time.perf_counter() - started
        self._planned[output.step] = (size, speculation.num_asked, planning_s)
        for step in [step for step in self._planned if step < output.step - MAX_IN_FLIGHT]:  # it has failed
            del self._planned[step]
        self._metrics.speculation_seconds += planning_s
        return replace(output, scheduled=tuple(items)) if any(item.draft.token_ids for item in items) else output

    def end(self, output: ScheduleOutput, results: Sequence[SequenceResult]) -> None:
        """Learn from the drafts of a committed step."""
        speculation, engine = self._speculation, self._managers.engine
        self._num_accepted = 0
        if not (output.has_drafts or (speculation is not None and engine.num_constrained)):
            return
        drafts = {item.id: item.draft for item in output.scheduled if item.draft.token_ids}
        by_source: dict[str, list[int]] = {}
        for result in results:
            if result.id not in engine:
                continue
            request = engine.request(result.id)
            num_cut = request.record.newest_jump.num_rolled_back if request.grammar is not None else 0
            if num_cut and result.token_id is not None and speculation is not None:
                speculation.on_cut(request, num_cut)
            if (draft := drafts.get(result.id)) is not None:
                num_drafted, num_accepted = len(draft.token_ids), len(result.accepted)
                request.record.count_draft(draft.source, num_drafted, num_accepted)
                if draft.source == EARLIER:
                    self._metrics.num_verified_tokens += num_drafted
                else:
                    assert speculation is not None
                    speculation.on_draft(draft.source, draft.confidence, num_drafted, num_accepted)
                    self._metrics.num_drafted_tokens += num_drafted
                    self._metrics.num_accepted_tokens += num_accepted
                    self._num_accepted += num_accepted
                so_far = by_source.get(draft.source, (0, 0))
                by_source[draft.source] = [so_far[0] + num_drafted, so_far[1] + num_accepted]
        if by_source:  # of each: rows that ran, and tokens among them that were the ones drawn
            self._trace.instant("drafts", step=output.step, sources=by_source)

    def on_step_timed(self, output: ScheduleOutput, seconds: float, num_steps: int = 1) -> None:
        """Learn the time of a step that holds decodes and drafts only, that of finding the drafts included. num_steps:
        so many that ran one after another, of this time each."""
        if num_steps > 1 and self._speculation is not None:
            self._speculation.rested(num_steps - 1, len(output.scheduled))
        planned = self._planned.pop(output.step, None)
        self._metrics.verify_seconds += self._shares.pop(output.step, 0.0) * seconds
        if self._speculation is not None and output.has_one_token_each:
            self._speculation.on_step_timed(output.num_rows, seconds)
            if planned is not None:
                size, num_asked, planning_s = planned
                num_drafted = output.num_rows - size.num_rows
                self._speculation.on_step_planned(size, num_asked, num_drafted, self._num_accepted, planning_s)

    def on_queued(self, request: Request) -> None:
        """Hear of a request that waits for its first step."""
        if request.earlier:
            self._verified.add(request)

    def on_end(self, request: Request) -> None:
        """Hear that a request has ended, with its final tokens, or that it begins again."""
        self._verified.discard(request)
        if self._speculation is not None:
            self._speculation.on_end(request)

    def _wanted(self, output: ScheduleOutput, most: int) -> tuple[list[Wanted], list[int]]:
        """Return the first sequences of a step that may have drafts, at most so many, and their places in it."""
        wanted: list[Wanted] = []
        places: list[int] = []
        refused: list[tuple[Request, NoDraft]] = []
        for index, item in enumerate(output.scheduled):
            if len(wanted) == most:
                break
            request = self._managers.engine.request(item.id)
            if (why := self._why_none(item, request)) is not None:
                refused.append((request, why))
            else:
                wanted.append(Wanted(request, self._most(request)))
                places.append(index)
        if self._speculation is not None:
            self._speculation.reasons.begin(NoDraft.RESTING, len(output.scheduled) - len(wanted) - len(refused))
            for request, why in refused:
                self._speculation.reasons.note(request, why)
        return wanted, places

    def _verify(self, output: ScheduleOutput) -> ScheduleOutput:
        """Return the step with as many tokens of earlier answers as it has room for."""
        items, budget = list(output.scheduled), self._scheduler.row_limit.now - output.num_rows
        for index, item in enumerate(items):
            request = self._managers.engine.request(item.id)
            if budget <= 0 or request not in self._verified or self._why_none(item, request) is not None:
                continue
            rest = request.rest_of_earlier
            if not rest and request.grammar is None:  # with one, a jump may take the output back to it
                self._verified.discard(request)
            if rest and self._managers.engine.is_stop(request, rest[-1]):
                rest = rest[:-1]  # it is drawn behind the others, and nothing behind it
            if token_ids := rest[: min(self._most(request), budget)]:
                items[index] = self._with_draft(item, request, Planned(token_ids, EARLIER, 0))
                budget -= len(items[index].draft.token_ids)
        return replace(output, scheduled=tuple(items))

    def _note_share(self, output: ScheduleOutput, verified: Collection[str]) -> None:
        """Note which share of a step's rows belongs to these sequences."""
        num_rows = sum(item.num_tokens + len(item.draft.token_ids) for item in output.scheduled if item.id in verified)
        self._shares[output.step] = num_rows / output.num_rows
        for step in [step for step in self._shares if step < output.step - MAX_IN_FLIGHT]:  # it has failed
            del self._shares[step]

    def _why_none(self, item: ScheduledSequence, request: Request) -> NoDraft | None:
        """Return why this share of a step may have no draft; None: it may."""
        sequence = request.sequence
        if item.jump or sequence.jump_start is not None:
            return NoDraft.JUMP
        if item.start + item.num_tokens != sequence.num_tokens:
            return NoDraft.PREFILL
        if not request.options.speculation and request not in self._verified:
            return NoDraft.REFUSED
        return None if self._most(request) > 0 else NoDraft.LAST_TOKEN

    def _most(self, request: Request) -> int:
        """Return the most tokens that a draft may have; not positive where there is no room for one."""
        sequence = request.sequence
        left = request.params.max_new_tokens - sequence.num_output_tokens
        return min(left, self._limits.max_model_len - sequence.num_tokens) - 1  # one is drawn behind the draft

    def _note(self, request: Request, why: NoDraft | None) -> None:
        """Note why a sequence has no draft in this step; None: it has one."""
        if self._speculation is not None:
            self._speculation.reasons.note(request, why)

    def _with_draft(self, item: ScheduledSequence, request: Request, planned: Planned) -> ScheduledSequence:
        """Return the share with as much of a draft as its grammar allows and as there is room for."""
        token_ids, masks = planned.token_ids, tuple[bytes | None, ...]()
        if request.grammar is not None:
            token_ids, masks = self._grammars.constrain_draft(request, planned.token_ids)
            if not token_ids:
                self._note(request, NoDraft.GRAMMAR)
                return item
        table = self._ledger.block_table(request)
        num_known, num_blocks = item.start + item.num_tokens, len(table)
        num_room = self._ledger.plan_draft(
            request, num_known, len(token_ids),
            num_slots_reserved=self._num_slots_reserved, num_blocks_reserved=self._num_blocks_reserved,
            # A waiting request may want what is cached; an earlier answer will take the blocks in any case.
            may_evict=planned.source == EARLIER or not self._scheduler.num_waiting,
        )  # fmt: skip
        if num_room <= 0:
            self._note(request, NoDraft.NO_BLOCKS)
            return item
        self._note(request, None)
        states = self._ledger.states.plan_draft(request, num_room) if self._ledger.states is not None else ()
        draft = Draft(token_ids[:num_room], masks[:num_room], states, planned.source, planned.confidence)
        return item._replace(draft=draft, new_blocks=(*item.new_blocks, *table[num_blocks:]))
