"""A benchmark's time: rounds end in good time on a slow or busy machine, with at least one of them measured."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

MAX_SECONDS = 240.0  # with what comes before and after the rounds, a benchmark ends within five minutes


class Budget:
    """The seconds that a benchmark may take, from its beginning on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left(self) -> float:
        """The seconds that are left; negative once it is used up."""
        return self._end - self._clock()

    def share(self, part: float) -> Budget:
        """Return a budget of this part of the seconds that are left, from now on."""
        return Budget(max(self.left, 0.0) * part, self._clock)

    def rounds(self, most: int, *, least: int = 1) -> Iterator[int]:
        """Yield 0, 1, ... up to `most` - 1. After the first `least` rounds none begins that would end too late, if it
        takes as long as the longest one so far; then the end is told on standard error."""
        longest = 0.0
        for index in range(most):
            if index >= least and self.left < longest:
                print(f"no time for more than {index} of {most} rounds", file=sys.stderr, flush=True)
                return
            began = self._clock()
            yield index
            longest = max(longest, self._clock() - began)


def add_budget_argument(parser: argparse.ArgumentParser, default: float = MAX_SECONDS) -> None:
    parser.add_argument(
        "--max-seconds", type=float, default=default, metavar="S",
        help="begin no round that would end later than this; one is measured in any case",
    )  # fmt: skip


def say(text: str) -> None:
    """Print a partial figure on standard error."""
    print(text, file=sys.stderr, flush=True)
