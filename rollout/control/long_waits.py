"""The word in the log about requests that get no step for long: what keeps them, so that none hangs in silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_S, LONGEST_S = 20.0, 640.0  # seconds before the first word, and at most between two, each twice as long


class LongWaits:
    """Count the seconds in which requests wait and no step may run. The thread that runs the steps calls it."""

    def __init__(self, why_not: Callable[[], str | None]) -> None:
        """Create it. why_not: returns why the requests get no step; None where none waits, or one may run."""
        self._why_not = why_not
        self._began: float | None = None  # of time.monotonic()
        self._after_s = FIRST_S  # seconds from there to the next word

    def end(self) -> None:
        """Begin anew: a step runs."""
        self._began, self._after_s = None, FIRST_S

    def seconds_left(self) -> float | None:
        """Return the seconds until `tell` is due; None: no request waits. The wait begins with the first call."""
        if self._why_not() is None:
            self.end()
            return None
        now = time.monotonic()
        if self._began is None:
            self._began = now
        return max(self._began + self._after_s - now, 0.0)

    def tell(self) -> None:
        """Say why the requests wait, if it is time."""
        if self.seconds_left() == 0.0 and (why := self._why_not()) is not None:
            logger.warning("requests have waited for %.0f s: %s", self._after_s, why)
            self._after_s += min(self._after_s, LONGEST_S)
