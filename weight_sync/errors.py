"""Run-time conditions of a weight update; a caller's own mistakes are ValueErrors that list all of them instead."""

from __future__ import annotations

from collections.abc import Iterable


class WeightSyncError(RuntimeError):
    """The base of every run-time condition that weight_sync raises on purpose."""


class TransferFailed(WeightSyncError):
    """A broken wire or a passed deadline; the message names rank, phase and tensor."""


class DigestMismatch(WeightSyncError):
    """Written bytes that differ from the sender's digests.

    names: the tensors that differ. remedy: advice to the caller, at the end of the message.
    """

    def __init__(self, names: Iterable[str], remedy: str = "") -> None:
        self.names: tuple[str, ...] = tuple(names)
        self.remedy = remedy
        listed = f"{len(self.names)} tensors differ from the sender's digests: {', '.join(self.names)}"
        super().__init__(f"{listed}; {remedy}" if remedy else listed)

    def __reduce__(self) -> tuple[type[DigestMismatch], tuple[tuple[str, ...], str]]:
        return type(self), (self.names, self.remedy)


class PlanMismatch(WeightSyncError):
    """Different transfer plans at the two ends of a wire; the message names the first difference."""


class Poisoned(WeightSyncError):
    """Weights that are neither the old ones nor the new ones; only a full, verified update helps."""


class SessionError(WeightSyncError):
    """A begin, update, commit or revert in the wrong order, or too late."""


class SessionBusy(SessionError):
    """A call that waited too long for another call of the session, and changed nothing: only the end of the other one
    decides how the session stands."""
