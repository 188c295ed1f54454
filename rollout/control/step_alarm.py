"""Something to be done as soon as so many steps have run. Its holder has the engine's lock."""

from __future__ import annotations

from collections.abc import Callable


class StepAlarm:
    """At most one call that waits for a step; the last that was set counts."""

    def __init__(self) -> None:
        self._due: int | None = None
        self._call: Callable[[], None] = lambda: None

    def set(self, num_steps: int | None, call: Callable[[], None] = lambda: None) -> None:
        """Call this once `num_steps` have run since the engine was made; None: nothing."""
        self._due, self._call = num_steps, call

    def is_due(self, num_steps: int) -> bool:
        """Whether no further step may begin before the call was made."""
        return self._due is not None and num_steps >= self._due

    def ring(self, num_steps: int) -> None:
        """Make the call if it is due. It may set the next."""
        while self.is_due(num_steps):
            self._due = None
            self._call()
