"""The turn to run the steps of an engine that was not started: one of the threads that wait for answers has it."""

from __future__ import annotations

import threading


class Turn:
    """Belong to at most one thread. It is taken under the engine's lock.

    Without it each waiting thread would ask for the lock to run the next schedule, and the running one would end after
    its first step to give way to it.
    """

    def __init__(self) -> None:
        self._thread: int | None = None  # whose turn it is

    @property
    def is_free(self) -> bool:
        """Whether no thread has it."""
        return self._thread is None

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._thread == threading.get_ident()

    def take(self) -> bool:
        """Take it if it is free; return whether this thread has it."""
        if self.is_free:
            self._thread = threading.get_ident()
        return self.is_mine

    def give_back(self) -> None:
        """Free it, where this thread has it."""
        if self.is_mine:
            self._thread = None
