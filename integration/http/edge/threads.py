"""Threads for calls that may block. Nothing here makes the event loop wait until a thread has started.

`threading.Thread.start` waits for its thread without a limit, and where memory is short a thread may end before it says
that it runs: an event loop that starts threads so would stand still for ever.
"""

from __future__ import annotations

import _thread  # the only start that does not wait
import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ....rollout.giving_way import giving_way
from .errors import forget_frames, is_expected

logger = logging.getLogger(__name__)

_KEPT_S = 10.0  # a thread without a call ends after so long, but for the first
_START_S = 60.0
_LONGEST_WAIT_S = 0.005  # a busy event loop delays a thread that gives way by so much for each slice
_COMPUTING = threading.Lock()  # of the thread whose slice it is
T = TypeVar("T")


class Threads:
    """Run calls that may block, on threads that do not keep the process from ending.

    Neither asyncio's executor nor `ThreadPoolExecutor` is enough: coroutines that wait for completions fill the first,
    the second waits at exit for calls that never return, and both start threads on the event loop.

    A thread that could not start takes no call with it: the call stays in the queue, for the next thread that is free
    or that a later call starts.
    """

    def __init__(self, limit: int, name: str = "lockstep-http") -> None:
        """Start one thread, which is kept. limit: number of calls that run at a time; further calls wait."""
        self._queue = _Queue(limit, name)
        weakref.finalize(self, self._queue.close)
        threading.Thread(target=self._queue.work, name=name, daemon=True).start()

    async def run(self, call: Callable[[], T]) -> T:
        """Return or raise the result of `call`. A call that began runs to its end also when the waiting task is
        cancelled."""
        future: Future[T] = Future()
        self._queue.put(lambda: fulfil(future, call) if future.set_running_or_notify_cancel() else None)
        return await asyncio.wrap_future(future)

    def start(self, call: Callable[[], object]) -> None:
        """Run a call without a wait for its result. Its error is logged."""

        def run() -> None:
            try:
                call()
            except Exception:  # a thread boundary
                logger.exception("a call failed whose result is not waited for")

        self._queue.put(run)


class _Queue:
    """Calls that wait, and the threads that take them. The threads end with the `Threads` object that made it."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._num_threads = self._num_free = 0
        self._is_closed = False

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call, and start a thread if all have one."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
            if len(self._calls) <= self._num_free or self._num_threads >= self._limit:
                return
        try:
            _thread.start_new_thread(self.work, ())
        except RuntimeError:  # the system allows no further thread: one of those that run will take the call
            logger.warning("no further thread could be started: %s calls wait", len(self._calls))

    def close(self) -> None:
        """Let the threads end that have no call."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def work(self) -> None:
        """Run calls until there has been none for a while."""
        with self._changed:
            if self._num_threads >= self._limit:
                return
            self._num_threads += 1
        try:
            threading.current_thread().name = self._name
            while (call := self._next()) is not None:
                call()
                del call  # what it holds must not wait for the next one
        except BaseException:  # for this thread there is no memory: another takes its place
            with self._changed:
                self._num_threads -= 1
            raise

    def _next(self) -> Callable[[], None] | None:
        """Wait for a call; None: the thread is to end, and is counted no more."""
        with self._changed:
            self._num_free += 1
            try:
                while not self._calls:
                    is_told = not self._is_closed and self._changed.wait(_KEPT_S)
                    if self._is_closed or not (is_told or self._calls or self._num_threads == 1):
                        self._num_threads -= 1
                        return None
                return self._calls.popleft()
            finally:
                self._num_free -= 1


def start_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads all run, so that none is started by a later call. Raises TimeoutError."""
    pool = ThreadPoolExecutor(num_threads, name)
    all_run = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        pool.submit(all_run.wait)
    try:
        all_run.wait(_START_S)
    except threading.BrokenBarrierError:
        raise TimeoutError(f"the threads {name} did not start within {_START_S:g} s") from None
    return pool


def run_giving_way(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Return or raise the result of `call`, in which `give_way` waits until this event loop has run what is ready. No
    two such calls of the process compute at a time."""
    with giving_way(partial(_wait_a_pass, loop), _COMPUTING):
        return call()


def _wait_a_pass(loop: asyncio.AbstractEventLoop) -> None:
    has_run = threading.Event()
    try:
        loop.call_soon_threadsafe(has_run.set)
    except RuntimeError:  # it is closed
        return
    has_run.wait(_LONGEST_WAIT_S)


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """Give the result of `call` to the future, or its error."""
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - a thread boundary: the waiting caller gets the error
        if is_expected(error):  # kept under an op_id, and not logged
            forget_frames(error)
        future.set_exception(error)
