"""The time that an explicit session has."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..deadline import Deadline

LEASE_THREAD = "weight-update-lease"


class Lease:
    """Runs from the moment it is made. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """Raises ValueError unless seconds is positive."""
        self.seconds = seconds
        self._deadline = Deadline.after(seconds)
        self._timer: threading.Timer | None = None

    @property
    def is_over(self) -> bool:
        return self._deadline.has_passed

    @property
    def left_s(self) -> float:
        return self._deadline.left_s

    def call_at_end(self, end: Callable[[], None]) -> None:
        """Call `end` in a thread of its own when the time is over, unless `cancel` comes first."""
        self._timer = threading.Timer(self.seconds, end)
        self._timer.daemon, self._timer.name = True, LEASE_THREAD
        self._timer.start()

    def cancel(self) -> None:
        """Let the timer's thread end without a call. Does nothing once it has fired."""
        if self._timer is not None:
            self._timer.cancel()
