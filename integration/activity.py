"""The work of this process, and how far it has come, for its sign of life to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Activity:
    """A name of the present work, the step that it is of, and a count that grows while the work goes on.

    The thread that does the work writes, and the thread that gives the signs of life reads.
    """

    def __init__(self) -> None:
        self.doing = ""  # "writing a checkpoint", say; empty: nothing is known
        self.step = 0  # of a job, from 1; 0: before the first one
        self.meeting: Callable[[], None] | None = None  # waits for all ranks, where they tell each other of their work
        self._num_noted = 0
        self._counts: tuple[Callable[[], int], ...] = ()  # of the works that are under way, the outermost first

    @contextmanager
    def of(self, doing: str, count: Callable[[], int] | None = None) -> Iterator[None]:
        """Name the work of the block. count: returns a number that grows while the work goes on; the thread of the
        signs of life calls it."""
        before = self.doing, self._counts
        self.doing = doing
        if count is not None:
            self._counts = (*self._counts, count)
        try:
            yield
        finally:
            self.doing, self._counts = before
            self.note()

    def note(self, amount: int = 1) -> None:
        """Count work that is done: bytes, or samples, say."""
        self._num_noted += amount

    @property
    def progress(self) -> int:
        """A number that differs from the one before if work was done meanwhile."""
        return self._num_noted + sum(count() for count in self._counts)
