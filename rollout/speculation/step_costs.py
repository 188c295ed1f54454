"""The time of a step by its number of rows, learned from the steps that have run.

Measured sizes are few, and their times are made ascending by pooling neighbours that are not (isotonic regression by
pool adjacent violators: Ayer et al. 1955).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable

WINDOW = 9  # steps of each size that are kept: slow ones do not count, for what slows a step comes from outside
WARM_UP = 4  # first steps of a size, which are left out: they compile, record or try something
LEAST = 4  # measured steps of a size before they count: one that was slow by chance would not be tried again
MAX_SIZES = 128  # sizes that are kept; the ones used least recently are forgotten
MAX_AGE = 128  # steps after which a size is measured again before drafts are compared with it
PRIOR_SLOPE = 0.05  # the least for a row more than was measured, as a share of a step with the fewest rows


class StepCosts:
    """Lower quartiles of the seconds of recent steps that hold decodes and drafts only."""

    def __init__(self, computed_rows: Callable[[int], int] = lambda num_rows: num_rows) -> None:
        """Start without measurements. computed_rows: the rows that a step of so many computes, padding included."""
        self._computed_rows = computed_rows
        self._seconds: dict[int, deque[float]] = {}  # by number of rows
        self._num_seen = Counter[int]()  # steps of each size
        self._last: dict[int, int] = {}  # number of the newest measured step of each size
        self._num_steps = 0
        self._known: tuple[list[int], list[float]] | None = None  # measured sizes and their seconds, both ascending
        self._sizes: dict[int, int] = {}  # by number of rows: the size that it counts as
        self._predicted: dict[int, float] = {}  # by size: seconds, as long as nothing is learned

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a step."""
        num_rows = self._size(num_rows)
        self._num_steps += 1
        self._num_seen[num_rows] += 1
        if self._num_seen[num_rows] <= WARM_UP:
            return
        self._last[num_rows] = self._num_steps
        recent = self._seconds.pop(num_rows, None) or deque(maxlen=WINDOW)
        recent.append(seconds)
        self._seconds[num_rows], self._known = recent, None
        self._predicted.clear()
        if len(self._seconds) > MAX_SIZES:
            oldest = next(iter(self._seconds))
            del self._seconds[oldest], self._last[oldest], self._num_seen[oldest]

    def knows(self, num_rows: int) -> bool:
        """Return whether a step of about this size was measured lately, so that larger ones can be compared with it."""
        num_rows = self._size(num_rows)
        near = [size for size in self._measured()[0] if size <= 2 * num_rows]
        return bool(near) and self._num_steps - self._last[min(near, key=lambda size: abs(size - num_rows))] <= MAX_AGE

    def has_run(self, num_rows: int) -> bool:
        """Return whether there was a step of this size."""
        return self._num_seen[self._size(num_rows)] > 0

    def seconds(self, num_rows: int) -> float:
        """Predict the seconds of a step: measured, or between or beyond sizes that were. Never less for more rows.

        Before the first measurement, the unit is the time of a step with no row.
        """
        size = self._sizes.get(num_rows)
        if size is None:
            size = self._sizes[num_rows] = self._size(num_rows)
        cost = self._predicted.get(size)
        if cost is None:
            cost = self._predicted[size] = self._predict(size)
        return cost

    def _predict(self, num_rows: int) -> float:
        sizes, costs = self._measured()
        index = bisect_right(sizes, num_rows)
        if not index:
            size, cost = (sizes[0], costs[0]) if sizes else (0, 1.0)
            return cost * (1 + PRIOR_SLOPE * num_rows) / (1 + PRIOR_SLOPE * size)
        size, cost = sizes[index - 1], costs[index - 1]
        if size == num_rows:
            return cost
        if index == len(sizes):
            return cost + max(PRIOR_SLOPE * costs[0], _last_slope(sizes, costs)) * (num_rows - size)
        return cost + (costs[index] - cost) * (num_rows - size) / (sizes[index] - size)

    def _measured(self) -> tuple[list[int], list[float]]:
        if self._known is None:
            sizes = sorted(size for size, recent in self._seconds.items() if len(recent) >= LEAST)
            quartiles = [sorted(recent)[len(recent) // 4] for recent in map(self._seconds.__getitem__, sizes)]
            self._known = sizes, _ascending(quartiles)
        return self._known

    def _size(self, num_rows: int) -> int:
        """Return the size that a step counts as: rows with padding, in eights where there are many."""
        computed = self._computed_rows(num_rows)
        return computed if computed <= 16 else -(-computed // 8) * 8


def _last_slope(sizes: list[int], costs: list[float]) -> float:
    """Return the seconds of a row between the largest size and the largest that is at most half of it; 0.0 without."""
    index = bisect_right(sizes, sizes[-1] // 2) - 1
    return (costs[-1] - costs[index]) / (sizes[-1] - sizes[index]) if index >= 0 else 0.0


def _ascending(values: list[float]) -> list[float]:
    """Return the ascending values with the least sum of squared distances from these."""
    pools: list[tuple[float, int]] = []  # mean, number
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, num_b), (a, num_a) = pools.pop(), pools.pop()
            pools.append(((a * num_a + b * num_b) / (num_a + num_b), num_a + num_b))
    return [mean for mean, num in pools for _ in range(num)]
