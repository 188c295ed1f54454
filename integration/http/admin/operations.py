"""Operations that run once per op_id and under a deadline, and the gate of updates."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ....rollout.control.once_per_id import OncePerId
from ....rollout.errors import DeadlineExceeded
from ..edge.errors import Busy
from ..edge.json_slices import encode_in_slices
from ..edge.threads import Threads, fulfil, start_pool

logger = logging.getLogger(__name__)

_KEYED = json.JSONEncoder(sort_keys=True, default=str)
T = TypeVar("T")


class Operations:
    """Administrative calls by op_id, and their deadlines. Belongs to one event loop."""

    def __init__(self, threads: Threads, once_per_id: OncePerId) -> None:
        self._threads = threads
        self._once_per_id = once_per_id
        self._digesting = start_pool(1, "lockstep-digests")  # not behind operations that wait

    async def run(
        self,
        path: str,
        call: Callable[[float | None], T],
        *,
        op_id: str | None = None,
        timeout_s: float | None = None,
        arguments: object = None,
    ) -> T:
        """Run `call(seconds_left)` on a thread and return its result; seconds_left is None without a deadline.

        A repeated op_id gets the result of the first run, an error too. Raises DeadlineExceeded if `timeout_s` passed
        before the call began, and then it never runs; OpIdTaken if the op_id belongs to another call.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def begin() -> T:
            seconds = None if deadline is None else deadline - time.monotonic()
            if seconds is not None and seconds <= 0:
                raise DeadlineExceeded(f"{path} did not begin within {timeout_s} s and will not run")
            return call(seconds)

        if op_id is None:
            return await self._threads.run(begin)
        # Only a hash of the arguments is kept, and long ones are hashed beside the event loop.
        answer, is_new = self._once_per_id.claim(op_id, path, await self._digest(arguments))
        if is_new:
            task = asyncio.ensure_future(self._threads.run(lambda: fulfil(answer, begin)))
            task.add_done_callback(_log_failure)  # logs a failure of the task itself
        return await asyncio.shield(asyncio.wrap_future(answer))

    async def _digest(self, arguments: object) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._digesting, _digest, arguments)


class UpdateGate:
    """Allow one weight update at a time; a second one is refused at once. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: tuple[str, float] | None = None  # name of the current update, and its start (time.monotonic)

    @property
    def age_s(self) -> float | None:
        """Age of the update in progress, in seconds; None: no update is in progress."""
        current = self._current
        return None if current is None else time.monotonic() - current[1]

    @contextmanager
    def enter(self, what: str) -> Iterator[None]:
        """Hold the gate for the update named `what`. Raises Busy, with the age of another update in progress."""
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


def _digest(arguments: object) -> str:
    sha = hashlib.sha256()
    for part in encode_in_slices(arguments, _KEYED.encode, sorts=True):
        sha.update(part.encode())
    return sha.hexdigest()


def _log_failure(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("an operation was lost", exc_info=task.exception())
