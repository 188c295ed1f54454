"""Moments that a call must not outlast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from ..kernels.machine.running_time import running_time


@dataclass(frozen=True)
class Deadline:
    """A moment on the clock of the time in which this process runs, and how far away it was at first."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Make a deadline after `timeout_s`. Raises ValueError unless it is positive."""
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        return cls(running_time() + timeout_s, timeout_s)

    @classmethod
    def within(cls, timeout_s: float | None) -> Deadline:
        """Make a deadline that may never come (None) or has passed already (0 or less), as the rest of another one."""
        timeout_s = math.inf if timeout_s is None else timeout_s
        return cls(running_time() + timeout_s, timeout_s)

    @property
    def left_s(self) -> float:
        return max(0.0, self.at - running_time())

    @property
    def has_passed(self) -> bool:
        return running_time() >= self.at

    @property
    def left(self) -> timedelta:
        """Return the time left as torch takes it: never zero, which torch reads as no limit."""
        return timedelta(milliseconds=max(1, int(self.left_s * 1000)))

    def at_most(self, timeout_s: float) -> Deadline:
        """Return the earlier of this deadline and `timeout_s` from now."""
        return Deadline(min(self.at, running_time() + timeout_s), timeout_s)
