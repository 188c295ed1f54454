"""A re-entrant lock that waiting threads get in the order in which they asked.

The loop takes the engine's lock for each step and releases it in between. With an ordinary lock it would take it again
before a waiting thread has woken up, and commands would wait until no request is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..held_signals import HeldSignals


class FairLock:
    """A re-entrant lock: a thread that asks for it gets it before its holder gets it again.

    An interrupt of the main thread (Ctrl-C, or another signal whose handler raises) waits while that thread holds the
    lock; it is raised where the lock is released, or by `call_handlers`. A wait for the lock is interrupted at once.
    """

    def __init__(self) -> None:
        self._turnstile = threading.RLock()  # held by the next thread; the others queue for it
        self._inner = threading.RLock()  # held once
        self._num_held = 0  # how many times its holder holds it
        self._is_waiting = False  # the holder of the turnstile waits for the inner lock
        self._returns = False  # the main thread has lent the lock in the middle of a block, and has to get it back
        self._signals = HeldSignals(self._keeps_signals)
        self._is_owned: Callable[[], bool] = self._inner._is_owned  # type: ignore[attr-defined]  # the stubs lack it
        self._is_next: Callable[[], bool] = self._turnstile._is_owned  # type: ignore[attr-defined]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; arguments and result as for threading.RLock.acquire."""
        if not self._is_owned() and not self._acquire_inner(blocking, timeout):
            return False
        self._num_held += 1  # no call follows, behind which a handler could raise
        return True

    def release(self) -> None:
        """Release the lock once. Raises RuntimeError where this thread does not hold it, and an interrupt that has come
        meanwhile."""
        if not self._is_owned():
            raise RuntimeError("the lock is not held by this thread")
        self._num_held -= 1
        if not self._num_held:
            self._inner.release()
            self._signals.give_back()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def call_handlers(self) -> None:
        """Raise an interrupt that has come while this thread held the lock. The caller holds it, and has nothing that
        would be lost."""
        self._signals.call()

    @property
    def is_mine_or_next(self) -> bool:
        """Whether this thread holds the lock, or is about to get it."""
        return self._is_owned() or self._is_next()

    def is_wanted(self) -> bool:
        """Return whether another thread waits for the lock. The caller holds it."""
        if self._turnstile.acquire(blocking=False):
            self._turnstile.release()
            return False
        return True

    def give_way(self) -> bool:
        """Let the threads that wait for the lock have it, each in its turn, and take it back. Returns False, and does
        nothing, where the caller holds it more than once: an outer block relies on it."""
        if self._num_held > 1:
            return False
        self._lend(lambda: None)
        return True

    def wait(self, woken: threading.Lock) -> None:
        """Release the lock, however often the caller holds it, until `woken` can be acquired. The wait can be
        interrupted."""

        def wait() -> None:
            try:
                self._returns = False
                self._signals.call()
                woken.acquire()
            finally:  # begins with a store: the caller has lent the lock, whether the main thread or another
                self._returns = True

        self._lend(wait if threading.current_thread() is threading.main_thread() else woken.acquire)

    def _lend(self, wait: Callable[[], object]) -> None:
        """Release the lock, call `wait`, and take the lock back, also after an exception."""
        is_main = threading.current_thread() is threading.main_thread()
        num_held, self._num_held = self._num_held, 0
        try:
            if is_main:
                self._returns = True
            self._inner.release()
            wait()
        finally:
            try:
                self._acquire_inner(blocking=True, timeout=-1)
                self._num_held = num_held
            finally:
                if is_main:
                    self._returns = False

    def _acquire_inner(self, blocking: bool, timeout: float) -> bool:
        """Acquire the inner lock. Where this raises neither lock is held."""
        began = time.monotonic()
        self._signals.take_over()
        try:
            if not self._turnstile.acquire(blocking, timeout):
                return False
            if timeout >= 0:
                timeout = max(timeout - (time.monotonic() - began), 0)
            try:
                self._is_waiting = True
                if not self._returns:
                    self._signals.call()
                return self._inner.acquire(blocking, timeout)
            finally:
                self._is_waiting = False
        finally:
            if self._is_next():
                self._turnstile.release()
            if not self._is_owned():
                self._signals.give_back()

    def _keeps_signals(self) -> bool:
        """Return whether the main thread, which calls this, would lose a lock if a handler raised now."""
        return self._returns or self._is_owned() or (self._is_next() and not self._is_waiting)
