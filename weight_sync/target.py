"""The interface of an engine whose weights can be updated: one verb call at a time, plain JSON values in and out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class AttendedTarget(Target, Protocol):
    """A target that is told at once when its client is gone."""

    def attend(self, client: str, *, timeout_s: float) -> AbstractContextManager[None]:
        """Keep a connection open in the block. When it closes, also by the end of this process, the target takes back
        the update of `client` and ends its pause, if it has not ended them. Raises TargetError where it cannot be
        opened within `timeout_s`."""
