"""A re-entrant lock that goes to whoever has waited longest.

The loop takes the engine's lock for each step and lets go in between; with an ordinary lock it would take it again
before anybody who waits has woken up, and commands would wait for the end of the load.
"""

from __future__ import annotations

import threading
import time


class FairLock:
    """Re-entrant; whoever asks while it is held gets it before its holder gets it again. Works with Condition."""

    def __init__(self) -> None:
        self._turnstile = threading.Lock()  # held by the one that is next; the others queue behind it
        self._inner = threading.RLock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As threading.RLock.acquire."""
        if self._is_owned():
            return self._inner.acquire()
        began = time.monotonic()
        if not self._turnstile.acquire(blocking, timeout):
            return False
        try:
            if timeout >= 0:
                timeout = max(timeout - (time.monotonic() - began), 0)
            return self._inner.acquire(blocking, timeout)
        finally:
            self._turnstile.release()

    def release(self) -> None:
        self._inner.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What threading.Condition asks of a lock that is held more than once.

    def _is_owned(self) -> bool:
        return self._inner._is_owned()

    def _release_save(self) -> object:
        return self._inner._release_save()

    def _acquire_restore(self, state: object) -> None:
        with self._turnstile:
            self._inner._acquire_restore(state)
