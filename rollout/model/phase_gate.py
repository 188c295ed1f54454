"""Who besides the trainer may come into its rollout phases: the end of a phase waits for those who are in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DeadlineExceeded


class PhaseGate:
    """Hosts open a phase and close it; guests come in while it is open, or wait for the next. Thread-safe.

    A host that closes last lets nobody else in and waits for the guests that are. Nobody polls.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_hosts = 0
        self._num_guests = 0
        self._mine = threading.local()  # .is_guest: of this thread

    def open(self) -> None:
        """A host begins a phase, or joins one."""
        with self._changed:
            self._num_hosts += 1
            self._changed.notify_all()

    def close(self) -> None:
        """A host leaves. The last one returns when every guest has left, but for the one that calls this itself."""
        with self._changed:
            self._num_hosts -= 1
            self._changed.wait_for(lambda: self._num_hosts > 0 or self._num_guests <= self._is_guest)

    @contextmanager
    def guest(self, what: str, timeout_s: float) -> Iterator[float]:
        """Be in a phase; yields the seconds that are left of `timeout_s`. Re-entrant.

        Raises DeadlineExceeded where none was open in that time: then nothing has happened, and nothing will.
        """
        deadline = time.monotonic() + timeout_s
        if self._is_guest:
            yield timeout_s
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_hosts > 0, timeout_s):
                raise DeadlineExceeded(
                    f"{what} waited {timeout_s:g} s for the rollout phase, for the module is the trainer's now: it did "
                    "not begin and will not run"
                )
            self._num_guests += 1
        self._mine.is_guest = True
        try:
            # A phase that came in the last moment leaves as good as no time, but never none.
            yield max(deadline - time.monotonic(), 1e-3)
        finally:
            self._mine.is_guest = False
            with self._changed:
                self._num_guests -= 1
                self._changed.notify_all()

    @property
    def _is_guest(self) -> bool:
        return getattr(self._mine, "is_guest", False)
