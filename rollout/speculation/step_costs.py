"""The time of a step by its number of rows, learned from the steps that have run."""

from __future__ import annotations

import itertools
from collections import deque

WINDOW = 9  # steps of each size that are kept: one slow step changes no median
MAX_SIZES = 128  # sizes that are kept; the ones used least recently are forgotten
PRIOR_SLOPE = 0.05  # of a step with one row more, as a share of a step with the fewest rows: before it was measured


class StepCosts:
    """Medians of the seconds of recent steps that hold decodes and drafts only."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}  # by number of rows
        self._seen: set[int] = set()  # sizes that have run once
        self._known: list[tuple[int, float]] | None = None  # measured sizes with their seconds, ascending in both

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a step. The first one of a size is left out: it may have compiled or recorded something."""
        if num_rows not in self._seen:
            self._seen.add(num_rows)
            return
        recent = self._seconds.pop(num_rows, None) or deque(maxlen=WINDOW)
        recent.append(seconds)
        self._seconds[num_rows], self._known = recent, None
        if len(self._seconds) > MAX_SIZES:
            del self._seconds[next(iter(self._seconds))]

    def seconds(self, num_rows: int) -> float:
        """Predict the seconds of a step: measured, or between or beyond sizes that were. Never less for more rows."""
        known = self._measured()
        below = [(size, cost) for size, cost in known if size <= num_rows]
        above = next(((size, cost) for size, cost in known if size >= num_rows), None)
        if not below:
            return above[1] if above else 1.0 + PRIOR_SLOPE * num_rows
        size, cost = below[-1]
        if above is None:
            return cost + PRIOR_SLOPE * known[0][1] * (num_rows - size)
        if above[0] == size:
            return cost
        return cost + (above[1] - cost) * (num_rows - size) / (above[0] - size)

    def _measured(self) -> list[tuple[int, float]]:
        if self._known is None:
            sizes = sorted(self._seconds)
            medians = [sorted(recent)[len(recent) // 2] for recent in map(self._seconds.__getitem__, sizes)]
            self._known = list(zip(sizes, itertools.accumulate(medians, max), strict=True))
        return self._known
