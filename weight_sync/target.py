"""A place whose weights can be updated: one verb call at a time, with plain JSON values in and out."""

from __future__ import annotations

from typing import Protocol

from .errors import WeightSyncError


class TargetError(WeightSyncError):
    """A target answered a verb with an error, or not at all."""

    def __init__(self, target: str, verb: str, message: str, kind: str = "") -> None:
        """kind: the error's class name at the target; "" where it could not be reached."""
        super().__init__(f"{target}: {verb}: {message}")
        self.target, self.verb, self.message, self.kind = target, verb, message, kind

    def __reduce__(self) -> tuple[type[TargetError], tuple[str, str, str, str]]:
        return type(self), (self.target, self.verb, self.message, self.kind)


class Target(Protocol):
    """An engine, in this process or elsewhere."""

    @property
    def name(self) -> str:
        """As errors call it."""

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        """Run a weight verb there and return its report. Calls of different threads may overlap.

        Raises TargetError for what it answers with, or when it does not answer within `timeout_s`.
        """

    def close(self) -> None:
        """End the connection; the engine stays."""
