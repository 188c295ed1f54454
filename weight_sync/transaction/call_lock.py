"""The lock of a session's calls: one at a time, and a call that waits too long says for which one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import SessionBusy


class CallLock:
    """A lock whose holder has a name."""

    def __init__(self, timeout_s: float) -> None:
        """Make it. timeout_s: how long a call waits that has no time of its own."""
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._holder = ""  # the call that holds the lock, for error messages of calls that waited too long

    @contextmanager
    def held(self, what: str, timeout_s: float | None, on_busy: Callable[[SessionBusy], object]) -> Iterator[None]:
        """Hold the lock for the call `what`. Calls `on_busy` and raises SessionBusy, naming the call that holds it,
        after `timeout_s` seconds; None: the lock's own time."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        if not self._lock.acquire(timeout=limit):
            error = SessionBusy(f"{what}: waited {limit:g} s for another call that is under way ({self._holder})")
            on_busy(error)
            raise error
        try:
            self._holder = what
            yield
        finally:
            self._lock.release()

    @contextmanager
    def held_at_last(self, what: str) -> Iterator[None]:
        """Hold the lock, however long another call takes."""
        with self._lock:
            self._holder = what
            yield
