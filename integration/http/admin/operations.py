"""How blocking calls run beside the event loop, each once, under its deadline, and one update at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from ....rollout.control.once_per_id import OncePerId
from ....rollout.errors import DeadlineExceeded
from ..edge.errors import Busy

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Threads:
    """Runs calls that may block, each on a daemon thread of its own: one that never returns keeps nobody from ending.

    Neither asyncio's executor nor a pool would do: coroutines that wait for completions fill the first, and a few calls
    that wait in a rendezvous would fill the second.
    """

    def __init__(self, limit: int) -> None:
        """limit: how many may be under way; more wait for their turn."""
        self._turns = asyncio.Semaphore(limit)

    async def run(self, call: Callable[[], T], name: str = "lockstep-http") -> T:
        """What `call` returns or raises. It runs to its end even where nobody waits for it any more."""
        async with self._turns:
            future: Future[T] = Future()
            threading.Thread(target=_fulfil, args=(future, call), name=name, daemon=True).start()
            return await asyncio.shield(asyncio.wrap_future(future))


class Operations:
    """Administrative calls by op_id, and their deadlines. One event loop's."""

    def __init__(self, threads: Threads, once_per_id: OncePerId) -> None:
        self._threads = threads
        self._once_per_id = once_per_id

    async def run(
        self,
        path: str,
        call: Callable[[float | None], T],
        *,
        op_id: str | None = None,
        timeout_s: float | None = None,
        arguments: object = None,
    ) -> T:
        """Run `call(seconds_left)` on a thread and return what it returns; None: no deadline.

        The same op_id again gets the answer of the one run, an error too. Raises DeadlineExceeded where `timeout_s`
        passed before it began, and then it never runs; OpIdTaken where the op_id stands for another call.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def begin() -> T:
            seconds = None if deadline is None else deadline - time.monotonic()
            if seconds is not None and seconds <= 0:
                raise DeadlineExceeded(f"{path} did not begin within {timeout_s} s and will not run")
            return call(seconds)

        if op_id is None:
            return await self._threads.run(begin)
        answer, is_new = self._once_per_id.claim(op_id, path, arguments)
        if is_new:
            task = asyncio.ensure_future(self._threads.run(lambda: _fulfil(answer, begin)))
            task.add_done_callback(_log_failure)  # refers to the task, which must not vanish while it runs
        return await asyncio.shield(asyncio.wrap_future(answer))


class UpdateGate:
    """Lets one weight update through at a time; whoever comes meanwhile is told so at once. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: tuple[str, float] | None = None  # what is in there, and since when (time.monotonic)

    @property
    def age_s(self) -> float | None:
        """Of the update that is in progress; None: none is."""
        current = self._current
        return None if current is None else time.monotonic() - current[1]

    @contextmanager
    def enter(self, what: str) -> Iterator[None]:
        """Raises Busy, with the age of the update that is in progress, where one is."""
        with self._lock:
            if self._current is not None:
                name, since = self._current
                age_s = round(time.monotonic() - since, 3)
                raise Busy(f"an update is in progress: {name}, for {age_s} s", in_progress=name, age_s=age_s)
            self._current = (what, time.monotonic())
        try:
            yield
        finally:
            self._current = None


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - a thread boundary: whoever waits gets it
        future.set_exception(error)


def _log_failure(task: asyncio.Future) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("an operation was lost", exc_info=task.exception())
