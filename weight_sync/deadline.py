"""A moment that a call must not outlast."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock, and how far away it was at first."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Raises ValueError unless timeout_s is positive."""
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        return cls(time.monotonic() + timeout_s, timeout_s)

    @classmethod
    def within(cls, timeout_s: float | None) -> Deadline:
        """One that may never come (None) or has passed already (0 and less), as what is left of another deadline."""
        timeout_s = math.inf if timeout_s is None else timeout_s
        return cls(time.monotonic() + timeout_s, timeout_s)

    @property
    def left_s(self) -> float:
        return max(0.0, self.at - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self.at

    @property
    def left(self) -> timedelta:
        """As torch takes it: never zero, which it reads as no limit."""
        return timedelta(milliseconds=max(1, int(self.left_s * 1000)))

    def at_most(self, timeout_s: float) -> Deadline:
        """The earlier of this deadline and one so far from now."""
        return Deadline(min(self.at, time.monotonic() + timeout_s), timeout_s)
