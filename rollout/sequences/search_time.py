"""The time for searching stop patterns, shared by the sequences of an engine.

Searches are measured in the processor time of their thread: waits for the interpreter's lock or a busy machine are no
searches, and cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_S = 0.1  # for all patterns at one token of one sequence
LEAST_S = 0.001  # for them when the shared time is used up: a quick pattern needs a hundredth
_MAX_SAVED_S = 0.5  # of shared time
_SHARE = 0.5  # of all time


class SearchTime:
    """Shared time that fills up with half of the time that passes, up to half a second.

    So the searches between two steps, of any number of sequences, take no more than about a second of the processor.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._saved, self._since = _MAX_SAVED_S, clock()

    def allowance(self) -> float:
        """Return the seconds of processor time that the searches of one sequence may take now."""
        self._fill()
        return min(max(self._saved, LEAST_S), MAX_S)

    def spend(self, seconds: float) -> None:
        """Take the processor time that searches have taken."""
        self._fill()
        self._saved -= seconds

    def _fill(self) -> None:
        now = self._clock()
        self._saved, self._since = min(self._saved + _SHARE * (now - self._since), _MAX_SAVED_S), now
