"""The time for searching stop patterns: that of a sequence, and that which the sequences of an engine share.

Searches are measured in the processor time of their thread: waits for the interpreter's lock or a busy machine are no
searches, and cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_S = 0.1  # for all patterns at one token of one sequence
LEAST_S = 0.001  # for them when other time is used up: a quick pattern needs a hundredth
TOKEN_S = 0.002  # of a sequence, which each of its tokens brings
_MAX_SAVED_S = 0.25  # of shared time
_SHARE = 0.1  # of all time


class SearchTime:
    """Shared time that fills up with a tenth of the time that passes, up to a quarter of a second.

    So patterns that take long, of any number of sequences, take a tenth of the time of the requests beside them.
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


class SequenceSearchTime:
    """The search time of one sequence: `MAX_S` at its beginning, and `TOKEN_S` more with each token, of the shared
    time.

    A pattern that takes longer at each token than at the one before is ended by it before it has taken much.
    """

    def __init__(self, shared: SearchTime) -> None:
        self.shared = shared
        self._saved, self._num_tokens = MAX_S, 0

    def allowance(self, num_tokens: int) -> float:
        """Return the seconds of processor time that searches may take now. num_tokens: of the output."""
        self._saved = min(self._saved + TOKEN_S * (num_tokens - self._num_tokens), MAX_S)
        self._num_tokens = num_tokens
        return min(max(self._saved, LEAST_S), self.shared.allowance())

    def spend(self, seconds: float) -> None:
        """Take the processor time that searches have taken."""
        self._saved = max(self._saved - seconds, 0.0)
        self.shared.spend(seconds)
