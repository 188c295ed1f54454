"""What runs in the next step: decodes first, then chunks of prompts under way, then waiting requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .admission import Admission
from .config import ADMISSION_RATIO, DEADLINE_MULTIPLIER, MIN_DEADLINE_S
from .kv_ledger import KVLedger
from .policies import Policy, find_policy, pick_victim
from .prefill_time import PrefillTimePredictor
from .radix_cache import Node
from .request import Request
from .schedule import ScheduledSequence, ScheduleOutput
from .sequence import State
from .waiting_queue import Priority

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLimits:
    """How much one step may hold."""

    max_num_seqs: int  # sequences that hold blocks
    max_num_batched_tokens: int  # rows
    chunked_prefill_size: int  # rows of one prompt
    max_model_len: int  # tokens of one sequence


class Scheduler:
    """Queues and decisions. It reads sequences and writes none: the managers do, from its output.

    What a step costs grows with the sequences that run and are taken up, not with those that wait.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds, the one that arrival times were read from. Raises ValueError for an unknown policy."""
        self._ledger = ledger
        self._limits = limits
        self._clock = clock
        self._now = clock()  # of the newest step
        self._predictor = PrefillTimePredictor(min(limits.chunked_prefill_size, limits.max_num_batched_tokens))
        self._policy: Policy = find_policy(policy)(self._predictor, deadline_multiplier, min_deadline_s)
        self._admission = Admission(ledger, limits.max_model_len, admission_ratio)
        self._queue = self._policy.make_queue()
        self._queued: set[Request] = set()  # waiting, in the queue or parked
        self._running: dict[Request, None] = {}  # holds blocks, in order of admission
        self._computing: dict[int, Request] = {}  # hash of a prompt block under way -> who computes it
        self._under_way: dict[Request, list[tuple[int, int]]] = {}  # its (last token + 1, hash), last block first
        self._parked: dict[int, list[Request]] = {}  # waits for the block of that hash to be computed
        self._num_parked = 0  # in all lists, those that ended since included
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
        """Share of what running sequences may still generate that admission keeps room for."""
        return self._admission.ratio

    def reset_admission(self) -> None:
        """Set the admission ratio back to its initial value, as when the cache is flushed."""
        self._admission.reset()

    def waiting(self) -> list[Request]:
        """Queued requests in the order of the policy, for reports."""
        return sorted(self._queued, key=self._rank)

    def running(self) -> list[Request]:
        """Requests that hold blocks, in order of admission."""
        return list(self._running)

    def add(self, request: Request) -> None:
        """Queue a request: a new one, or one that was preempted."""
        assert request not in self._queued and request not in self._running
        self._policy.arrive(request)
        self._queued.add(request)
        self._queue.push(request)

    def on_step_completed(self, output: ScheduleOutput, requests: dict[str, Request]) -> None:
        """The step ran: publish the KV that is complete now. `requests` holds the live ones by id."""
        for item in output.scheduled:
            request = requests.get(item.id)
            if request in self._running and item.incarnation == request.num_retractions:
                self._ledger.publish(request, item.start + item.num_tokens)
                self._end_computing(request, item.start + item.num_tokens)

    def on_step_timed(self, output: ScheduleOutput, seconds: float) -> None:
        """The model ran this step in so many seconds: what deadlines and slacks are predicted from."""
        self._predictor.observe(output, seconds)

    def remove(self, request: Request) -> None:
        """The request ended: take it out of its queue, give back what it holds."""
        if request in self._running:
            self._give_back(request)
        self._queued.discard(request)
        self._queue.discard(request)
        self._policy.forget(request)
        self._ledger.forget(request)
        if not self.has_work:
            self.reset_admission()

    def retract(self, request: Request) -> None:
        """Take back the blocks of a running request and queue it again. The caller tells the managers."""
        self._give_back(request)
        self.add(request)

    def requeue(self, request: Request) -> None:
        """Make a live request wait, wherever it is now."""
        if request in self._running:
            self._give_back(request)
        if request not in self._queued:
            self.add(request)

    def schedule(self) -> ScheduleOutput:
        """Decide the next step. Changes queues and the ledger; sequences change when the managers take the output."""
        self._step += 1
        self._now = self._clock()
        self._ledger.pins.expire()
        budget = self._limits.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        preempted: list[str] = []
        exhausted: list[tuple[str, str]] = []
        decodes_first = sorted(self._running, key=lambda r: r.is_prefilling_ahead)
        in_step: set[Request] = set()
        for request in decodes_first:
            if budget == 0:
                break
            if request not in self._running:
                continue  # preempted by an earlier one of this loop
            num_tokens = self._num_next(request, budget)
            if num_tokens == 0:
                continue  # the step under way is its last
            new_blocks = self._make_room(request, num_tokens, in_step, preempted)
            if new_blocks is None:
                if request in self._running:
                    exhausted.append((request.id, self._why_exhausted(request)))
                continue
            scheduled.append(self._item(request, num_tokens, new_blocks, None))
            in_step.add(request)
            budget -= num_tokens
        ignored: list[tuple[str, str]] = []
        if preempted:
            self._admission.on_retraction(self._running)
        else:
            self._admit(budget, scheduled, ignored, exhausted)
            if scheduled:
                self._admission.on_good_step()
        return ScheduleOutput(self._step, tuple(scheduled), tuple(preempted), tuple(ignored), tuple(exhausted))

    # -- running sequences --------------------------------------------------------------------------------------

    def _num_next(self, request: Request, budget: int) -> int:
        """Rows of the request's next chunk; 0 when the step that runs now will end it."""
        is_at_end_of_context = request.num_tokens_ahead >= self._limits.max_model_len
        if request.is_ending or (request.num_tokens_in_flight and is_at_end_of_context):
            return 0
        num_left = request.num_tokens_ahead - request.num_processed_ahead
        return min(num_left, self._limits.chunked_prefill_size, budget)

    def _make_room(
        self, request: Request, num_tokens: int, in_step: set[Request], preempted: list[str]
    ) -> list[int] | None:
        """Grow the request's table for its next rows, preempting others if it must.

        None when it was preempted itself (then it is in `preempted`), or when it is alone and the pool is full.
        """
        needed = request.num_processed_ahead + num_tokens
        while (blocks := self._ledger.grow(request, needed)) is None:
            candidates = [r for r in self._running if r not in in_step]
            if candidates == [request]:
                if not in_step:
                    if self._unpin(request, lambda: self._ledger.num_missing(request, needed)):
                        continue
                    return None
                victim = request  # others run this step and will free blocks: wait for them
            else:
                victim = pick_victim(candidates, self._rank)
            preempted.append(victim.id)
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

    # -- waiting sequences --------------------------------------------------------------------------------------

    def _admit(
        self,
        budget: int,
        scheduled: list[ScheduledSequence],
        ignored: list[tuple[str, str]],
        exhausted: list[tuple[str, str]],
    ) -> None:
        """Take waiting requests in the order of the policy until rows, places or blocks run out.

        Parks, and gives up on, at most as many as may run, so that a step never looks at all who wait.
        """
        most = self._limits.max_num_seqs
        reserve: int | None = None  # counted once there is a request to admit
        while budget > 0 and len(self._running) < most and self._num_parked < most:
            request = self._queue.peek(self._now)
            if request is None or len(ignored) + len(exhausted) >= most:
                break
            if (why := self._why_never(request)) is not None:
                self._queue.discard(request)
                self._queued.discard(request)
                (exhausted if request.num_retractions else ignored).append((request.id, why))
                continue
            nodes = self._ledger.match(request)
            if (hash := self._hash_being_computed(request, len(nodes))) is not None:
                self._queue.discard(request)
                self._parked.setdefault(hash, []).append(request)
                self._num_parked += 1
                continue
            if not self._running:  # or those that run will make room as they end
                self._unpin(request, partial(self._num_blocks_to_take, request, nodes))
            if reserve is None:
                reserve = self._admission.num_blocks_reserved(self._running)
            if not self._fits(request, nodes, reserve):
                break
            self._queue.discard(request)
            self._queued.discard(request)
            self._running[request] = None
            self._ledger.open(request, nodes)
            num_known, num_cached = request.sequence.num_tokens, len(nodes) * self._ledger.block_size
            num_tokens = min(num_known - num_cached, self._limits.chunked_prefill_size, budget)
            blocks = self._ledger.grow(request, num_cached + num_tokens)
            assert blocks is not None
            reserve += self._admission.num_blocks_reserved((request,))
            if request.num_retractions == 0:
                request.num_cached_tokens = num_cached
            self._begin_computing(request, len(nodes))
            table = [node.block for node in nodes] + blocks
            is_new = request.sequence.state is State.WAITING
            token_ids = tuple(request.sequence.token_ids) if is_new else None
            scheduled.append(self._item(request, num_tokens, table, token_ids, start=num_cached))
            budget -= num_tokens

    def _fits(self, request: Request, nodes: list[Node], reserve: int) -> bool:
        """Whether the pool has the blocks that the request is expected to have, besides those kept for running ones.
        When nothing runs its known tokens are enough: whoever comes first is always taken."""
        if self._running:
            num_wanted = self._admission.num_blocks_expected(request)
        else:
            num_wanted = self._ledger.num_blocks_for(request.sequence.num_tokens)
        return num_wanted - len(nodes) + _num_evictable(nodes) + reserve <= self._ledger.num_available

    def _num_blocks_to_take(self, request: Request, nodes: list[Node]) -> int:
        """Available blocks that the request, not admitted yet, is expected to take, decoding included."""
        return self._admission.num_blocks_expected(request) - len(nodes) + _num_evictable(nodes)

    def _unpin(self, request: Request, num_blocks: Callable[[], int]) -> bool:
        """Where pins leave less than `num_blocks()` to the only request that could run, lift the fewest that help;
        returns whether any was."""
        ledger = self._ledger
        if not len(ledger.pins) or num_blocks() <= ledger.num_available:
            return False
        why = f"request {request.id} needs {num_blocks()} blocks, {ledger.num_available} were left"
        released = ledger.pins.release_until(lambda: num_blocks() - ledger.num_available, why)
        if released:
            logger.warning("pins on %d blocks were lifted, %d stand: %s", len(released), len(ledger.pins), why)
        return bool(released)

    def _why_never(self, request: Request) -> str | None:
        num_known = request.sequence.num_tokens
        num_new = min(request.params.max_new_tokens, 1)
        if num_known + num_new > self._limits.max_model_len:
            return f"{num_known} tokens leave no room in a context of {self._limits.max_model_len}"
        usage = self._ledger.usage
        if self._ledger.num_blocks_for(num_known) > usage.num_blocks:
            return (
                f"{num_known} tokens can never fit the KV pool of {usage.num_blocks} blocks of "
                f"{self._ledger.block_size} tokens"
            )
        return None

    # -- prompt blocks under way: equal prompts wait for the first of them, then hit its blocks --------------------

    def _hash_being_computed(self, request: Request, num_matched: int) -> int | None:
        if not self._computing or num_matched >= request.max_reusable_tokens // self._ledger.block_size:
            return None
        hash = self._ledger.hash_of_block(request, num_matched)
        return hash if hash in self._computing else None

    def _begin_computing(self, request: Request, num_matched: int) -> None:
        if not self._ledger.prefix_cache:
            return
        size, under_way = self._ledger.block_size, []
        for index in range(num_matched, request.sequence.num_tokens // size):
            hash = self._ledger.hash_of_block(request, index)
            if self._computing.setdefault(hash, request) is request:
                under_way.append(((index + 1) * size, hash))
        if under_way:
            self._under_way[request] = under_way[::-1]

    def _end_computing(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` of the request are in the cache, or never will be: let those who wait look again."""
        under_way = self._under_way.get(request)
        while under_way and under_way[-1][0] <= num_tokens:
            _, hash = under_way.pop()
            del self._computing[hash]
            parked = self._parked.pop(hash, ())
            self._num_parked -= len(parked)
            for waiting in parked:
                if waiting in self._queued:
                    self._queue.push(waiting)
        if under_way is not None and not under_way:
            del self._under_way[request]

    def forget_under_way(self) -> None:
        """What is computed now will never be in the cache: let those who wait for it compute it themselves."""
        for request in list(self._under_way):
            self._end_computing(request, request.sequence.num_tokens)

    # -- helpers ------------------------------------------------------------------------------------------------

    def _give_back(self, request: Request) -> None:
        del self._running[request]
        self._ledger.close(request)
        self._end_computing(request, request.sequence.num_tokens)

    def _rank(self, request: Request) -> Priority:
        return self._policy.rank(request, self._now)

    @staticmethod
    def _item(
        request: Request, num_tokens: int, new_blocks: list[int], token_ids: tuple[int, ...] | None,
        start: int | None = None,
    ) -> ScheduledSequence:
        if start is None:
            start = request.num_processed_ahead
        return ScheduledSequence(request.id, request.num_retractions, start, num_tokens, tuple(new_blocks), token_ids)


def _num_evictable(nodes: list[Node]) -> int:
    """Matched nodes that count as available until a sequence holds them."""
    return sum(node.is_free_to_go for node in nodes)
