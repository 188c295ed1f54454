"""Limits on bytes that many requests keep in memory together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """A number of bytes that is shared out. It is counted on one event loop."""

    def __init__(self, num_bytes: int) -> None:
        self.limit = num_bytes
        self.num_taken = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Yield an empty share, which is given back after the block."""
        share = Share(self)
        try:
            yield share
        finally:
            share.resize(0)


class Share:
    """The part of a budget that one request has."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def resize(self, num_bytes: int) -> bool:
        """Make the share as large as this. Returns False, and changes nothing, where the budget has too little left;
        a share can always become smaller."""
        taken = self._budget.num_taken + num_bytes - self._num_bytes
        if num_bytes > self._num_bytes and taken > self._budget.limit:
            return False
        self._budget.num_taken, self._num_bytes = taken, num_bytes
        return True
