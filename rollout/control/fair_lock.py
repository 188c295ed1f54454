"""A re-entrant lock that waiting threads get in the order in which they asked.

The loop takes the engine's lock for each step and releases it in between. With an ordinary lock it would take it again
before a waiting thread has woken up, and commands would wait until no request is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class FairLock:
    """A re-entrant lock: a thread that asks for it gets it before its holder gets it again. Works with Condition."""

    def __init__(self) -> None:
        self._turnstile = threading.Lock()  # held by the next thread; the others queue for it
        self._inner = threading.RLock()
        self._num_held = 0  # how many times its holder holds it
        # threading.Condition calls these of a lock that may be held more than once. RLock has them for the same
        # purpose; the stubs of the library leave them out.
        self._is_owned: Callable[[], bool] = self._inner._is_owned  # type: ignore[attr-defined]
        self._release_save: Callable[[], object] = self._inner._release_save  # type: ignore[attr-defined]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; arguments and result as for threading.RLock.acquire."""
        if self._is_owned():
            self._num_held += 1
            return self._inner.acquire()
        began = time.monotonic()
        if not self._turnstile.acquire(blocking, timeout):
            return False
        try:
            if timeout >= 0:
                timeout = max(timeout - (time.monotonic() - began), 0)
            if is_mine := self._inner.acquire(blocking, timeout):
                self._num_held = 1
            return is_mine
        finally:
            self._turnstile.release()

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("the lock is not held by this thread")
        self._num_held -= 1
        self._inner.release()

    def is_wanted(self) -> bool:
        """Return whether another thread waits for the lock. The caller holds it."""
        return self._turnstile.locked()

    def give_way(self) -> bool:
        """Let the threads that wait for the lock have it, each in its turn, and take it back. Returns False, and does
        nothing, where the caller holds it more than once: an outer block relies on it."""
        if self._num_held > 1:
            return False
        self.release()
        self.acquire()
        return True

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()  # which looks whose it is: an interrupt may have ended a block between a release and an acquire

    def _acquire_restore(self, state: object) -> None:
        with self._turnstile:
            self._inner._acquire_restore(state)  # type: ignore[attr-defined]
            self._num_held = state[0]  # type: ignore[index]
