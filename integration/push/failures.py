"""The error of a push that no target has."""

from __future__ import annotations

from collections.abc import Sequence

from ...weight_sync.errors import WeightSyncError
from ...weight_sync.target import TargetError
from ...weight_sync.transports.transport import TargetsFailed


class PushFailed(WeightSyncError):
    """No target has the new version; the message names each failed target and its error.

    failures: errors by target name, "" for this process. stranded: targets that could not be restored or not be
    reached; their weights are not known, and they must not generate before a full update.
    """

    def __init__(self, version: str, failures: dict[str, str], stranded: Sequence[str] = ()) -> None:
        self.version, self.failures, self.stranded = version, failures, tuple(stranded)
        listed = "; ".join(f"{name or 'this process'}: {why}" for name, why in failures.items())
        lost = f"; could not be taken back from: {', '.join(stranded)}" if stranded else ""
        super().__init__(f"version {version} was not pushed: {listed}{lost}")


def failures_of(error: Exception) -> dict[str, str]:
    """Return the errors by target name; "" is this process."""
    if isinstance(error, TargetsFailed):
        return {name: str(failure) for name, failure in error.failures.items()}
    return {error.target if isinstance(error, TargetError) else "": str(error)}
