"""The time limit of an explicit session."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..deadline import Deadline

LEASE_THREAD = "weight-update-lease"


class Lease:
    """A time limit that starts when the object is made, and again with `renew`. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """Start the time. Raises ValueError unless seconds is positive."""
        self.seconds = seconds
        self._deadline = Deadline.after(seconds)
        self._timer: threading.Timer | None = None
        self._end: Callable[[], None] | None = None

    @property
    def is_over(self) -> bool:
        return self._deadline.has_passed

    @property
    def left_s(self) -> float:
        return self._deadline.left_s

    def call_at_end(self, end: Callable[[], None]) -> None:
        """Call `end` in a thread of its own when the time has passed, unless `cancel` comes first. `end` is called
        again for each `renew` that comes later."""
        self._end = end
        self._timer = threading.Timer(self.seconds, end)
        self._timer.daemon, self._timer.name = True, LEASE_THREAD
        self._timer.start()

    def renew(self) -> None:
        """Start the time again, also when it has passed. A timer that has fired may still come to its `end`, which has
        to look at `is_over`."""
        self._deadline = Deadline.after(self.seconds)
        if self._end is not None:
            self.cancel()
            self.call_at_end(self._end)

    def cancel(self) -> None:
        """Stop the timer without a call of `end`. Does nothing once the timer has fired."""
        if self._timer is not None:
            self._timer.cancel()
