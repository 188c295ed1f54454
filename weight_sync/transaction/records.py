"""Records of one weight-update session: its written tensors, its verified tensors, and its commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..manifest import TensorSpec
from .lease import Lease
from .transaction import Coverage, WeightTransaction


@dataclass(frozen=True)
class UpdateRecord:
    """One update that was written. It counts when its session commits."""

    source: str
    version: str | None
    num_tensors: int
    num_bytes: int
    verified: bool  # all of its tensors were compared with the sender's digests
    explicit: bool  # its session was begun by the caller
    seconds: float


@dataclass(frozen=True)
class SessionRecord:
    """The result of a committed session."""

    version: str | None  # the last one given to begin, update or commit
    coverage: Coverage  # "full" where every required tensor was written, whichever coverage the session was opened with
    verified: bool  # all written tensors were compared with the sender's digests
    sources: tuple[str, ...]  # of its updates, each once, in order
    num_tensors: int
    num_bytes: int  # received, repairs included
    seconds: float  # from begin to commit
    num_undo_bytes: int


@dataclass
class WeightSession:
    """One session while it is open and, after its commit, as long as the commit can be reverted."""

    transaction: WeightTransaction
    explicit: bool
    version: str | None
    started: float  # of time.monotonic
    lease: Lease | None = None  # None: no time limit
    client: str | None = None  # its name, see `owners`
    healing: str | None = None  # why the weights were poisoned when the session began
    sources: list[str] = field(default_factory=list)
    verified: set[str] = field(default_factory=set)  # `WeightTransaction.written_units`
    unchecked: set[str] = field(default_factory=set)  # resident names that some rank could not check
    num_bytes: int = 0

    @property
    def already_open(self) -> str:
        """Explain why no other session begins."""
        whose = "" if self.client is None else f", that of {self.client}"
        return f"a weight-update session is already open{whose}; call end_weight_update() first"

    @property
    def is_expired(self) -> bool:
        return self.lease is not None and self.lease.is_over

    def is_heard(self) -> None:
        """Note that the session's client has called: its lease starts again."""
        if self.lease is not None:
            self.lease.renew()

    def unverified(self) -> list[str]:
        return [name for name in self.transaction.written_units() if name not in self.verified]

    def account(
        self, source: str, version: str | None, specs: Sequence[TensorSpec], matching: set[str], unchecked: set[str]
    ) -> bool:
        """Enter an update and return whether all of its tensors match. matching: names whose digests equal the
        sender's, of this update's bytes."""
        names = {unit for spec in specs for unit in self.transaction.units(spec.name)}
        matched = {unit for name in matching for unit in self.transaction.units(name)}
        self.sources.append(source)
        self.version = version if version is not None else self.version
        self.num_bytes += sum(spec.num_bytes for spec in specs)
        self.verified = self.verified - names | matched
        self.unchecked = self.unchecked - names | unchecked
        return bool(names) and names <= matched

    def record(self, version: str | None) -> SessionRecord:
        names = self.transaction.written_names()
        return SessionRecord(
            version if version is not None else self.version,
            "partial" if self.transaction.missing() else "full",
            bool(names) and not self.unverified(),
            tuple(dict.fromkeys(self.sources)),
            len(names),
            self.num_bytes,
            time.monotonic() - self.started,
            self.transaction.num_undo_bytes,
        )
