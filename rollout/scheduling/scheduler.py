"""The choice of the next step: decodes first, then chunks of prompts under way, then waiting requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ..config import ADMISSION_RATIO, DEADLINE_MULTIPLIER, MIN_DEADLINE_S
from ..kv.ledger import KVLedger
from ..sequences.request import Request
from ..sequences.sequence import State
from ..sequences.step import ScheduleDraft, ScheduledSequence, ScheduleOutput
from .admission import Admission
from .pipelining import Pipelining
from .policies import Policy, find_policy, pick_victim
from .prefill_time import PrefillTimePredictor
from .prompts_under_way import PromptsUnderWay
from .row_limit import RowLimit
from .waiting_queue import Priority

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLimits:
    """The most that one step may hold."""

    max_num_seqs: int  # sequences that hold blocks
    max_num_batched_tokens: int  # rows
    chunked_prefill_size: int  # rows of one prompt
    max_model_len: int  # tokens of one sequence

    @property
    def most_prompt_rows(self) -> int:
        """The rows of one prompt that one step may hold."""
        return min(self.chunked_prefill_size, self.max_num_batched_tokens)


class Scheduler:
    """Decide steps and keep the queues. The scheduler only reads sequences: the managers change them, from its output.

    The cost of a step grows with the sequences that run and are admitted, not with those that wait.
    """

    def __init__(
        self,
        ledger: KVLedger,
        limits: StepLimits,
        policy: str = "fcfs",
        *,
        deadline_multiplier: float = DEADLINE_MULTIPLIER,
        min_deadline_s: float = MIN_DEADLINE_S,
        admission_ratio: float = ADMISSION_RATIO,
        pipelining: Pipelining | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a scheduler without requests.

        clock: seconds, the clock of arrival times. Raises ValueError for an unknown policy.
        """
        self._ledger = ledger
        self._limits = limits
        self._pipelining = pipelining or Pipelining()
        self._has_one_stage = self._pipelining.num_stages == 1
        self._clock = clock
        self._now = clock()  # time of the newest step
        self._predictor = PrefillTimePredictor(limits.most_prompt_rows)
        self._policy: Policy = find_policy(policy)(self._predictor, deadline_multiplier, min_deadline_s)
        # Takes the seconds of each step: deadlines and slacks are predicted from them.
        self.on_step_timed: Callable[[ScheduleOutput, float], None] = self._predictor.observe
        self._admission = Admission(ledger, limits.max_model_len, admission_ratio)
        self._queue = self._policy.make_queue()
        self._queued: set[Request] = set()  # waiting, in the queue or parked
        self._running: dict[Request, None] = {}  # holds blocks, in order of admission
        self._under_way = PromptsUnderWay(ledger)
        self.row_limit = RowLimit(limits.max_num_batched_tokens)
        self._step = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queued)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queued)

    @property
    def admission_ratio(self) -> float:
        """Share of the tokens that running sequences may still generate for which admission keeps room."""
        return self._admission.ratio

    def reset_admission(self) -> None:
        """Set the admission ratio back to its initial value, for a flush of the cache."""
        self._admission.reset()

    def waiting(self) -> list[Request]:
        """Return the queued requests in the order of the policy, for reports."""
        return sorted(self._queued, key=self._rank)

    def running(self) -> list[Request]:
        """Return the requests that hold blocks, in order of admission."""
        return list(self._running)

    def add(self, request: Request) -> None:
        """Queue a request: a new one, or one that was preempted."""
        assert request not in self._queued and request not in self._running
        self._policy.arrive(request)
        self._queued.add(request)
        self._queue.push(request)

    def on_step_completed(
        self, output: ScheduleOutput, requests: dict[str, Request], accepted: Mapping[str, int] | None = None,
        num_steps: int = 1,
    ) -> None:  # fmt: skip
        """Publish the KV that is complete after this step, and give back what drafts took in vain.

        requests: the live ones by id. accepted: by id the tokens that came before the last one, of a draft or of
        several steps; none of others. num_steps: that have run.
        """
        self.row_limit.on_good_step(num_steps)
        self._admission.on_good_step(num_steps - 1)  # the first one counts when it is scheduled
        block_size, running = self._ledger.block_size, self._running
        for item in output.scheduled:
            start, end = item.start, item.start + item.num_tokens
            has_draft = bool(item.draft.token_ids) or output.num_steps > 1  # for whose tokens blocks were taken
            num_accepted = accepted.get(item.id, 0) if has_draft and accepted else 0
            end += num_accepted
            if start // block_size == end // block_size and item.allowed is None and not has_draft:
                continue  # no further block is full
            request = requests.get(item.id)
            if request in running and item.incarnation == request.num_retractions:
                if request.sequence.jump_start is not None:
                    continue  # its tokens may change: this step's blocks are published with those of the jump's last
                # A step may bring more tokens than needed: tokens behind the end have KV, but no hash.
                self._ledger.publish(request, min(end, request.sequence.num_tokens))
                self._look_again(self._under_way.end(request, end))
                if has_draft:
                    self._ledger.settle_draft(request, end, num_accepted)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended from its queue, and release its blocks."""
        if request in self._running:
            self._give_back(request)
        self._queued.discard(request)
        self._queue.discard(request)
        self._policy.forget(request)
        self._ledger.forget(request)
        if not self.has_work:
            self.reset_admission()

    def retract(self, request: Request) -> None:
        """Take back the blocks of a running request and queue it again. The caller informs the managers."""
        self._give_back(request)
        self.add(request)

    def requeue(self, request: Request) -> None:
        """Make a live request wait, whether it runs or is queued now."""
        if request in self._running:
            self._give_back(request)
        if request not in self._queued:
            self.add(request)

    def forget_under_way(self) -> None:
        """End all waits for blocks under way, which will never be in the cache: the requests compute them
        themselves."""
        self._look_again(self._under_way.end_all())

    def schedule(self) -> ScheduleOutput:
        """Decide the next step. Changes queues and the ledger; sequences change when the managers apply the output."""
        self._step += 1
        self._now = self._clock()
        self._ledger.pins.expire()
        draft = ScheduleDraft(self.row_limit.now)
        self._continue_running(draft)
        if draft.preempted:
            self._admission.on_retraction(self._running)
        else:
            self._admit(draft)
            if draft.scheduled:
                self._admission.on_good_step()
        return draft.output(self._step)

    # -- running sequences --------------------------------------------------------------------------------------

    def _continue_running(self, draft: ScheduleDraft) -> None:
        """Add the next rows of running requests: decodes, up to this step's share, then prompts under way."""
        running = self._running
        max_decodes = None if self._has_one_stage else self._pipelining.max_decodes(running)
        num_decodes = 0
        in_step: set[Request] = set()
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in running:
            (prompts if request.is_prefilling_ahead else decodes).append(request)
        for index, request in enumerate(decodes + prompts):
            if draft.budget == 0:
                break
            if request not in running:
                continue  # preempted earlier in this loop
            num_tokens = self._num_next(request, draft.budget)
            is_decode = index < len(decodes)
            if num_tokens == 0 or (is_decode and num_decodes == max_decodes):
                continue
            start = request.num_processed_ahead
            new_blocks = self._make_room(request, start + num_tokens, in_step, draft)
            if new_blocks is not None:
                self._put(draft, request, start, num_tokens, new_blocks)
                in_step.add(request)
                num_decodes += is_decode
            elif request in self._running:
                draft.exhausted.append((request.id, self._why_exhausted(request)))

    def _num_next(self, request: Request, budget: int) -> int:
        """Count the rows of the request's next chunk; 0 when it has to wait for a step in flight, which may be its
        last."""
        sequence, in_flight = request.sequence, request.in_flight  # no property calls: asked of every running request
        num_ahead = len(sequence.token_ids) + in_flight.num_tokens
        if in_flight.num_tokens and (request.is_ending or num_ahead >= self._limits.max_model_len):
            return 0
        num_left = num_ahead - sequence.num_tokens_stage_processed - in_flight.num_rows
        num_rows = 1
        if num_left != 1:
            num_rows = min(num_left, self._limits.chunked_prefill_size, budget)
            num_rows = self._ledger.num_rows_to_snapshot(request, request.num_processed_ahead, num_rows)
            num_rows = request.num_rows_of_whole_blocks(request.num_processed_ahead, num_rows)
        if self._has_one_stage or self._pipelining.may_run(request, is_last_chunk=num_rows == num_left):
            return num_rows
        return 0

    def _make_room(
        self, request: Request, needed: int, in_step: set[Request], draft: ScheduleDraft
    ) -> list[int] | None:
        """Grow the request's table to hold `needed` tokens, preempting other requests if it must.

        A victim may be in flight: on every stage the steps in flight run before this step writes to their blocks.
        Returns the new blocks. Returns None when the request was preempted itself (then the draft lists it), or when it
        is alone and the pool is full.
        """
        while (blocks := self._ledger.grow(request, needed)) is None:
            candidates = [r for r in self._running if r not in in_step]
            if candidates == [request]:
                if not in_step:
                    if self._unpin(request, lambda: self._ledger.num_missing(request, needed)):
                        continue
                    return None
                victim = request  # other requests run in this step and will free blocks: wait for them
            else:
                victim = pick_victim(candidates, self._rank)
            draft.preempted.append(victim.id)
            self._give_back(victim)
            self.add(victim)
            if victim is request:
                return None
        return blocks

    def _why_exhausted(self, request: Request) -> str:
        usage = self._ledger.usage
        return (
            f"the KV pool of {usage.num_blocks} blocks of {self._ledger.block_size} tokens is full with this sequence "
            f"alone at {request.num_tokens_ahead} tokens"
        )

    def grow_up_to(self, request: Request, num_tokens: int) -> int:
        """Grow the table of a request in the newest step, as far as blocks are available: no other is preempted for it.

        Lifts pins where the request is the only one with blocks. Returns the number of tokens, at most `num_tokens`,
        that the table holds.
        """
        if len(self._running) == 1:
            self._unpin(request, lambda: self._ledger.num_missing(request, num_tokens))
        return self._ledger.grow_up_to(request, num_tokens)

    # -- waiting sequences --------------------------------------------------------------------------------------

    def _admit(self, draft: ScheduleDraft) -> None:
        """Admit waiting requests in the order of the policy until rows, places or blocks run out.

        Parks and rejects at most as many as may run, so that a step never examines all waiting requests. Those that
        earlier steps have parked hold up no others.
        """
        most, num_parked = self._limits.max_num_seqs, 0
        reserve: int | None = None  # counted once there is a request to admit
        while draft.budget > 0 and len(self._running) < most and num_parked < most:
            request = self._queue.peek(self._now)
            if request is None or len(draft.ignored) + len(draft.exhausted) >= most:
                break
            if (why := self._admission.why_never(request)) is not None:
                self._queue.discard(request)
                self._queued.discard(request)
                (draft.exhausted if request.num_retractions else draft.ignored).append((request.id, why))
                continue
            nodes = self._ledger.match(request)
            if (hash := self._under_way.hash_to_wait_for(request, len(nodes))) is not None:
                self._queue.discard(request)
                self._under_way.park(request, hash)
                num_parked += 1
                continue
            if not self._running:  # otherwise running requests will make room when they end
                self._unpin(request, partial(self._admission.num_blocks_to_take, request, nodes))
            if reserve is None:
                reserve = self._admission.num_blocks_reserved(self._running)
            if not self._admission.fits(request, nodes, reserve, is_alone=not self._running):
                break
            self._queue.discard(request)
            self._queued.discard(request)
            self._running[request] = None
            self._ledger.open(request, nodes)
            num_known, num_cached = request.sequence.num_tokens, len(nodes) * self._ledger.block_size
            num_tokens = min(num_known - num_cached, self._limits.chunked_prefill_size, draft.budget)
            num_tokens = self._ledger.num_rows_to_snapshot(request, num_cached, num_tokens)
            num_tokens = request.num_rows_of_whole_blocks(num_cached, num_tokens)
            blocks = self._ledger.grow(request, num_cached + num_tokens)
            assert blocks is not None
            reserve += self._admission.num_blocks_reserved((request,))
            if request.num_retractions == 0:
                request.num_cached_tokens = num_cached
            self._under_way.begin(request, len(nodes))
            self._put(draft, request, num_cached, num_tokens, [node.block for node in nodes] + blocks)

    def _unpin(self, request: Request, num_blocks: Callable[[], int]) -> bool:
        """Lift the fewest pins that help when they leave less than `num_blocks()` to the only request that could run.

        Returns whether any pin was lifted.
        """
        ledger = self._ledger
        if not len(ledger.pins) or num_blocks() <= ledger.num_available:
            return False
        why = f"request {request.id} needs {num_blocks()} blocks, {ledger.num_available} were left"
        released = ledger.pins.release_until(lambda: num_blocks() - ledger.num_available, why)
        if released:
            logger.warning("pins on %d blocks were lifted, %d stand: %s", len(released), len(ledger.pins), why)
        return bool(released)

    # -- helpers ------------------------------------------------------------------------------------------------

    def _give_back(self, request: Request) -> None:
        del self._running[request]
        self._ledger.close(request)
        self._look_again(self._under_way.leave(request))

    def _look_again(self, parked: list[Request]) -> None:
        """Queue parked requests again, those that still wait: their block is in the cache or never will be."""
        for request in parked:
            if request in self._queued:
                self._queue.push(request)

    def _rank(self, request: Request) -> Priority:
        return self._policy.rank(request, self._now)

    def _put(self, draft: ScheduleDraft, request: Request, start: int, num_tokens: int, new_blocks: list[int]) -> None:
        """Put the request's rows from `start` on in this step, with its tokens if the ranks do not have them yet."""
        sequence = request.sequence
        token_ids = tuple(sequence.token_ids) if sequence.state is State.WAITING else None
        draft.put(ScheduledSequence(
            sequence.id, request.num_retractions, start, num_tokens, tuple(new_blocks), token_ids,
            num_blocks_kept=self._ledger.num_blocks_kept(request, len(new_blocks)),
            states=self._ledger.plan_states(request, start, start + num_tokens),
            num_prompt_tokens=None if token_ids is None else sequence.num_prompt_tokens,
        ))  # fmt: skip
