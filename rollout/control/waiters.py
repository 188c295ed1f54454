"""The callers that wait for the steps of another thread, each for a condition of its own.

After a schedule only those are woken whose condition holds. Were all woken, each of them would ask for the engine's
lock, and the next schedule would end after its first step to give way to them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from .fair_lock import FairLock

Condition = Callable[[], bool]


class Kick:
    """A wake-up for one thread, which any thread gives. An interrupt of the giver loses none, as it may in the middle
    of `threading.Event.set`, whose lock nothing would release."""

    def __init__(self) -> None:
        self._is_missing = threading.Lock()  # held while none was given
        self._is_missing.acquire()

    def give(self) -> None:
        """Wake the thread, now or at its next wait."""
        with suppress(RuntimeError):  # it was given already
            self._is_missing.release()

    def forget(self) -> None:
        """Forget those that were given."""
        self._is_missing.acquire(blocking=False)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until one is given, at most so many seconds; forget it."""
        self._is_missing.acquire(timeout=-1 if timeout_s is None else timeout_s)


@dataclass(eq=False, slots=True)
class _Waiter:
    is_done: Condition
    wake: Callable[[], None]
    is_thread: bool


class Waiters:
    """Keep the waiting threads and coroutines. A condition is called in any thread, and raises nothing."""

    def __init__(self, lock: FairLock) -> None:
        """Create it. lock: held by the threads that wait, and by all that wake."""
        self._lock = lock
        self._waiters: dict[_Waiter, None] = {}  # those of coroutines come and go without the lock

    @property
    def num_waiting(self) -> int:
        """The number of those that wait."""
        return len(self._waiters)

    def wait(self, is_done: Condition) -> None:
        """Release the lock, which the caller holds, until it is woken."""
        woken = threading.Lock()
        woken.acquire()
        waiter = _Waiter(is_done, woken.release, is_thread=True)
        self._waiters[waiter] = None
        try:
            self._lock.wait(woken)
        finally:
            self._waiters.pop(waiter, None)

    async def wait_in_coroutine(self, is_done: Condition, must_wait: Condition) -> None:
        """Wait until it is woken; the caller does not hold the lock. Return at once where the condition holds already,
        or `must_wait` is false. No thread is kept meanwhile, of which an event loop has few."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the event loop was closed under its coroutine, which ends nothing any more
                loop.call_soon_threadsafe(woken.set)

        waiter = _Waiter(is_done, wake, is_thread=False)
        self._waiters[waiter] = None  # before the look: what changes behind it wakes
        try:
            if must_wait() and not is_done():
                await woken.wait()
        finally:
            self._waiters.pop(waiter, None)

    def wake_done(self) -> None:
        """Wake those whose condition holds. The caller holds the lock."""
        self._wake(waiter for waiter in list(self._waiters) if waiter.is_done())

    def wake_one(self) -> None:
        """Wake a thread whose condition may not hold. The caller holds the lock."""
        self._wake([waiter for waiter in list(self._waiters) if waiter.is_thread][:1])

    def wake_all(self) -> None:
        """Wake all, so that each looks whether it may still wait. The caller holds the lock."""
        self._wake(list(self._waiters))

    def _wake(self, waiters: Iterable[_Waiter]) -> None:
        for waiter in waiters:
            self._waiters.pop(waiter, None)  # it is woken once
            waiter.wake()
