"""Requests that wait for a worker: while workers start or are restarted, while an update holds all of them back, and
while all are full."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...http.edge.errors import HttpError
from ..calls import WorkerCall
from .aborted import PATHS, Abort, Aborted, AbortLog, Names
from .worker import Worker
from .workers import WorkerRegistry, needs_operator, why_none

_RETRY = {"Retry-After": "1"}


def draining() -> HttpError:
    """Make the error for a new request while the router finishes its open ones before it ends."""
    message = "the router is draining: it finishes its open requests and takes no new ones"
    return HttpError(503, message, code="draining", headers=_RETRY)


@dataclass(eq=False)
class _Abortable:
    """One request that an abort would end."""

    names: Names
    limit: asyncio.Timeout
    why: str | None = None  # it was aborted


class HeldRequests:
    """The waiting requests in the order of their arrival. The first one gets a worker before the next one looks."""

    def __init__(self, registry: WorkerRegistry, max_held: int) -> None:
        """Wait for changes of this registry. max_held: requests that may wait at a time."""
        self._registry = registry
        self._max_held = max_held
        self._turns: OrderedDict[asyncio.Event, None] = OrderedDict()  # the first one's is set when it may look
        self._for_one: set[asyncio.Event] = set()  # of requests that only one worker can answer; set by each change
        self._num_apart = 0  # requests that wait for a time, and not for their turn
        self._closed = asyncio.Event()
        self._abortable: set[_Abortable] = set()
        self.aborts = AbortLog()
        registry.on_change.append(self._wake_first)

    def __len__(self) -> int:
        return len(self._turns) + len(self._for_one) + self._num_apart

    def close(self) -> None:
        """Answer 503 to every waiting request, and to every one that would have to wait, because the router drains."""
        self._closed.set()
        self._wake_first()

    @asynccontextmanager
    async def abortable(self, call: WorkerCall, rids: Collection[str] = ()) -> AsyncIterator[None]:
        """Let an abort end the block, which finds a worker for this call. rids: the open ones at the worker before.
        Raises Aborted then."""
        if call.path not in PATHS:
            yield
            return
        one = _Abortable(Names(call, set(rids) or None), asyncio.timeout(None))
        self._abortable.add(one)
        try:
            async with one.limit:
                yield
        except TimeoutError:
            if one.why is None:
                raise
        finally:
            self._abortable.discard(one)
        if one.why is not None:
            raise Aborted(call, one.why)

    async def end_if_aborted(
        self, call: WorkerCall, rids: Collection[str], aborts: Iterable[Abort], max_lists: int
    ) -> None:
        """Raise Aborted where these aborts, together, are of a whole request that has left its worker. rids: the open
        ones at this worker."""
        names = Names(call, set(rids) or None)
        for abort in aborts if call.path in PATHS else ():
            if await names.are_aborted(abort, max_lists):
                raise Aborted(call, abort.message)

    async def abort(self, abort: Abort, max_lists: int) -> int:
        """End the waiting requests that are meant, before a worker has them. Those at a worker end there, or by
        `end_if_aborted`. Returns the number of those that it has ended."""
        self.aborts.add(abort)
        num_ended = 0
        for one in list(self._abortable):
            is_meant = await one.names.are_aborted(abort, max_lists)
            if is_meant and one.why is None and one in self._abortable:
                one.why = abort.message
                one.limit.reschedule(asyncio.get_running_loop().time())
                num_ended += 1
        return num_ended

    async def worker(self, find: Callable[[], Worker | None], deadline: float) -> Worker:
        """Return the worker that `find` returns, as soon as it does and all earlier requests have theirs. A request
        that is cancelled leaves the queue. Raises HttpError 503 at `deadline` (time.monotonic), where too many wait,
        and where only an operator, or an update of lost weights, can bring a worker back."""
        if not self._turns and (worker := find()) is not None:
            return worker
        self._check_room(why_none(self._registry))
        turn = asyncio.Event()
        self._turns[turn] = None
        self._wake_first()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while True:
                    await turn.wait()
                    turn.clear()
                    if (worker := find()) is not None:
                        return worker
                    if self._closed.is_set():
                        raise draining()
                    if needs_operator(self._registry):
                        raise self._no_worker()
        except TimeoutError:
            raise self._no_worker() from None
        finally:
            del self._turns[turn]
            self._wake_first()

    async def its_worker(
        self,
        find: Callable[[], Worker | None],
        deadline: float,
        why_none_can: Callable[[], str] | None = None,
        able: Callable[[], Collection[Worker]] = tuple,
    ) -> Worker:
        """Return as `worker` for a request that only some workers can answer: others do not wait for it. why_none_can:
        explains an error. able: these workers; where each of them needs an operator, the request does not wait. Raises
        also what `find` raises."""
        if (worker := find()) is not None:
            return worker
        self._check_room(why_none(self._registry))
        changed = asyncio.Event()
        self._for_one.add(changed)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while True:
                    if self._closed.is_set():
                        raise draining()
                    if (workers := able()) and all(worker.needs_operator for worker in workers):
                        raise self._no_worker(why_none(workers))
                    await changed.wait()
                    changed.clear()
                    if (worker := find()) is not None:
                        return worker
        except TimeoutError:
            raise self._no_worker(why_none_can and why_none_can()) from None
        finally:
            self._for_one.discard(changed)

    async def pause(self, until: float, why: str) -> None:
        """Wait until that time (time.monotonic), because all workers refuse this request till then; others do not wait
        for it. Raises HttpError 503 where too many wait, and when the router drains."""
        self._check_room(why)
        self._num_apart += 1
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._closed.wait()
        except TimeoutError:
            return
        finally:
            self._num_apart -= 1
        raise draining()

    def _check_room(self, why: str) -> None:
        if len(self) >= self._max_held:
            message = f"{len(self)} requests wait for a worker already: {why}"
            raise HttpError(503, message, code="queue_full", headers=_RETRY)

    def _no_worker(self, why: str | None = None) -> HttpError:
        message = f"no worker takes requests: {why or why_none(self._registry)}"
        return HttpError(503, message, code="no_workers", headers=_RETRY)

    def _wake_first(self) -> None:
        for changed in self._for_one:
            changed.set()
        if self._turns:
            next(iter(self._turns)).set()
