"""A gate that lets guests into a trainer's rollout phases. The end of a phase waits for its guests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DeadlineExceeded


class PhaseGate:
    """A gate with hosts and guests. Hosts open and close a phase; guests enter an open one or wait for the next.

    The last host to close admits no more guests and waits for those inside. Thread-safe; no thread polls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # entered itself, in one instruction: an interrupt of a condition's may lose it
        self._changed = threading.Condition(self._lock)
        self._num_hosts = 0
        self._num_guests = 0
        self._mine = threading.local()  # .is_guest: whether this thread is one

    def open(self) -> None:
        """Begin a phase as a host, or join an open one."""
        with self._lock:
            self._num_hosts += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Leave the phase as a host. The last host waits until every guest but the calling thread has left."""
        with self._lock:
            self._num_hosts -= 1
            self._changed.wait_for(lambda: self._num_hosts > 0 or self._num_guests <= self._is_guest)

    @contextmanager
    def guest(self, what: str, timeout_s: float) -> Iterator[float]:
        """Wait for a phase and stay in it as a guest; yields the seconds left of `timeout_s`. Re-entrant.

        Raises DeadlineExceeded if no phase opened in that time. Nothing has changed then.
        """
        deadline = time.monotonic() + timeout_s
        if self._is_guest:
            yield timeout_s
            return
        with self._lock:
            if not self._changed.wait_for(lambda: self._num_hosts > 0, timeout_s):
                raise DeadlineExceeded(
                    f"{what} waited {timeout_s:g} s for the rollout phase, for the module is the trainer's now: it did "
                    "not begin and will not run"
                )
            self._num_guests += 1
        self._mine.is_guest = True
        try:
            # A phase that opened at the last moment leaves hardly any time, but more than zero.
            yield max(deadline - time.monotonic(), 1e-3)
        finally:
            self._mine.is_guest = False
            with self._lock:
                self._num_guests -= 1
                self._changed.notify_all()

    @property
    def _is_guest(self) -> bool:
        return getattr(self._mine, "is_guest", False)
