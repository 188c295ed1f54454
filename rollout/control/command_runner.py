"""How a command runs: between two steps, with none in flight, in the thread that gives it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ..errors import DeadlineExceeded
from ..loop.commands import Command, check_timeout
from ..loop.loop import Loop
from ..loop.on_host import on_host
from ..loop.parts import Parts
from .desk.inbox import Inbox
from .fair_lock import FairLock
from .once_per_id import OncePerId
from .shared_step import KeptPhase

T = TypeVar("T")


class CommandRunner:
    """Run commands under the engine's lock, each at most once under its id."""

    def __init__(
        self,
        lock: FairLock,
        parts: Parts,
        loop: Loop,
        inbox: Inbox,
        take_posted: Callable[[], None],
        wake: Callable[[], None],
        kept_phase: KeptPhase,
    ) -> None:
        """Create it. take_posted: queues the posted requests; wake: wakes the callers whom a command may concern."""
        self._kept_phase = kept_phase
        self.once_per_id = OncePerId()
        self._lock, self._inbox, self._loop = lock, inbox, loop
        self._reports, self._kv_events = parts.reports, parts.ledger.events
        self._take_posted, self._wake = take_posted, wake

    def run(self, name: str, call: Callable[[], T], op_id: str | None, timeout_s: float | None, arguments: object) -> T:
        """Call it between two steps. The errors are those of `Driver.command`."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        self._inbox.before_next()

        def drained() -> T:
            with self._reports.trace.span(name), on_host():
                self._take_posted()
                self._loop.drain()
                self._kept_phase.end()
                try:
                    return call()
                finally:
                    self._kv_events.flush()
                    self._kept_phase.end()  # steps may have run in between

        reply, is_new = self.once_per_id.claim(op_id, name, arguments)
        if is_new:
            with self.once_per_id.running(op_id, name, reply):
                self._execute(Command(name, drained, reply, timeout_s))
        elif timeout_s is not None:
            self._wait_for_begin(name, reply, timeout_s)
        return reply.result()

    def _wait_for_begin(self, name: str, reply: Future[Any], timeout_s: float) -> None:
        """Wait until another call of the same id has begun, or has its answer. Raises DeadlineExceeded."""
        wait([reply], timeout_s)
        if not (reply.running() or reply.done()):
            raise DeadlineExceeded(
                f"{name} did not begin within {timeout_s} s; the call that came first under its op_id still may"
            )

    def _execute(self, command: Command) -> None:
        with self._inbox.counted():
            seconds = command.seconds_left
            has_lock = self._lock.acquire(timeout=-1 if seconds is None else seconds)
        if not has_lock:
            command.give_up()
            return
        try:
            command.execute()
            self._wake()
        finally:
            self._lock.release()
