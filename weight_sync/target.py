"""The interface of an engine whose weights can be updated: one verb call at a time, plain JSON values in and out."""

from __future__ import annotations

from typing import Protocol

from .errors import WeightSyncError


class TargetError(WeightSyncError):
    """A verb that a target answered with an error, or not at all."""

    def __init__(self, target: str, verb: str, message: str, kind: str = "") -> None:
        """Create the error. kind: the error's class name at the target; "" if the target could not be reached."""
        super().__init__(f"{target}: {verb}: {message}")
        self.target, self.verb, self.message, self.kind = target, verb, message, kind

    def __reduce__(self) -> tuple[type[TargetError], tuple[str, str, str, str]]:
        return type(self), (self.target, self.verb, self.message, self.kind)


class Target(Protocol):
    """An engine, in this process or elsewhere."""

    @property
    def name(self) -> str:
        """Its name in error messages."""

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        """Run a weight verb there and return its report. Thread-safe; calls of different threads may overlap.

        Raises TargetError for an error at the target, or without an answer within `timeout_s`.
        """

    def close(self) -> None:
        """End the connection; the engine keeps running."""
