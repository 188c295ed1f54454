"""One callback that runs after a given number of steps. Not thread-safe: hold the engine's lock."""

from __future__ import annotations

from collections.abc import Callable


class StepAlarm:
    """At most one callback; a new one replaces the old one."""

    def __init__(self) -> None:
        self._due: int | None = None
        self._call: Callable[[], None] = lambda: None

    def set(self, num_steps: int | None, call: Callable[[], None] = lambda: None) -> None:
        """Set the callback to run once the engine has run `num_steps` steps; None: no callback."""
        self._due, self._call = num_steps, call

    def is_due(self, num_steps: int) -> bool:
        """Return whether the callback has to run before the next step."""
        return self._due is not None and num_steps >= self._due

    def ring(self, num_steps: int) -> None:
        """Run the callback if it is due. It may set the next one."""
        while self.is_due(num_steps):
            self._due = None
            self._call()
