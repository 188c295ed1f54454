"""Run-time conditions of a weight update; what a caller got wrong is a ValueError that lists every offender instead."""

from __future__ import annotations

from collections.abc import Iterable


class WeightSyncError(RuntimeError):
    """Base of every run-time condition that weight_sync raises on purpose."""


class TransferFailed(WeightSyncError):
    """A wire broke or its deadline passed; the message names rank, phase and tensor."""


class DigestMismatch(WeightSyncError):
    """What was written is not what the sender digested.

    names: the tensors that differ. remedy: what the caller may do about it, at the end of the message.
    """

    def __init__(self, names: Iterable[str], remedy: str = "") -> None:
        self.names: tuple[str, ...] = tuple(names)
        self.remedy = remedy
        listed = f"{len(self.names)} tensors differ from the sender's digests: {', '.join(self.names)}"
        super().__init__(f"{listed}; {remedy}" if remedy else listed)

    def __reduce__(self) -> tuple[type[DigestMismatch], tuple[tuple[str, ...], str]]:
        return type(self), (self.names, self.remedy)


class PlanMismatch(WeightSyncError):
    """Two ends of a wire plan different transfers; the message names the first difference."""


class Poisoned(WeightSyncError):
    """The weights are neither the old ones nor the new ones; only a full, verified update helps."""


class SessionError(WeightSyncError):
    """begin, update, commit or revert in the wrong order, or too late."""
