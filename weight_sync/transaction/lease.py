"""The time limit of an explicit session."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..deadline import Deadline

LEASE_THREAD = "weight-update-lease"
_PAUSE_S = 5.0  # longest time between two tries to end what the lease was for


class Lease:
    """A time limit that starts when the object is made, and again with `renew`. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """Start the time. Raises ValueError unless seconds is positive."""
        self.seconds = seconds
        self._deadline = Deadline.after(seconds)
        self._is_cancelled = threading.Event()

    @property
    def is_over(self) -> bool:
        return self._deadline.has_passed

    @property
    def left_s(self) -> float:
        return self._deadline.left_s

    def call_at_end(self, end: Callable[[], None]) -> None:
        """Call `end` in a thread of its own when the time has passed, and again and again until `cancel` comes: after
        the new time, where it was renewed before `end` looked at `is_over`, and else after a pause, since other ranks
        may not have come for it."""
        threading.Thread(target=self._watch, args=(end,), daemon=True, name=LEASE_THREAD).start()

    def renew(self) -> None:
        """Start the time again, also when it has passed."""
        self._deadline = Deadline.after(self.seconds)

    def cancel(self) -> None:
        """End the thread without another call of `end`."""
        self._is_cancelled.set()

    def _watch(self, end: Callable[[], None]) -> None:
        pause_s = 0.0
        while not self._is_cancelled.wait(max(self.left_s, pause_s)):
            if self.is_over:
                end()
                pause_s = min(self.seconds, _PAUSE_S)
