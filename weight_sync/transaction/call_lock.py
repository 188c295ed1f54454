"""The lock of a session's calls: one at a time, and a call that waits too long says for which one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import SessionBusy


class CallLock:
    """A lock whose holder has a name. It is released also where an interrupt comes right behind its acquisition."""

    def __init__(self, timeout_s: float) -> None:
        """Make it. timeout_s: how long a call waits that has no time of its own."""
        self.timeout_s = timeout_s
        self._lock = threading.RLock()  # held once: it is one of those that know whether this thread holds them
        self._is_mine: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # the stubs lack it
        self._holder = ""  # the call that holds the lock, for error messages of calls that waited too long

    @contextmanager
    def held(self, what: str, timeout_s: float | None, on_busy: Callable[[SessionBusy], object]) -> Iterator[None]:
        """Hold the lock for the call `what`. Calls `on_busy` and raises SessionBusy, naming the call that holds it,
        after `timeout_s` seconds; None: the lock's own time. At once where it is a call of this thread."""
        limit = self.timeout_s if timeout_s is None else max(timeout_s, 0.0)
        if self._is_mine():
            raise self._busy(what, 0.0, on_busy)
        try:
            if not self._lock.acquire(timeout=limit):
                raise self._busy(what, limit, on_busy)
            self._holder = what
            yield
        finally:
            self._release()

    @contextmanager
    def held_at_last(self, what: str) -> Iterator[None]:
        """Hold the lock, however long another call takes."""
        try:
            self._lock.acquire()
            self._holder = what
            yield
        finally:
            self._release()

    def _busy(self, what: str, waited_s: float, on_busy: Callable[[SessionBusy], object]) -> SessionBusy:
        error = SessionBusy(f"{what}: waited {waited_s:g} s for another call that is under way ({self._holder})")
        on_busy(error)
        return error

    def _release(self) -> None:
        try:
            if self._is_mine():
                self._lock.release()
        finally:
            if self._is_mine():  # an interrupt came in between
                self._lock.release()
