"""The interface through which update sessions use an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .records import SessionRecord
from .transaction import Coverage, Undo, WeightTransaction


class SessionHost(Protocol):
    """Open transactions over an engine's weights, digest them and publish them.

    A `SessionManager` calls every method but `on_lease_over` while it holds its lock: of the manager's own methods a
    host may call `state` only.
    """

    def make_transaction(self, coverage: Coverage, undo: Undo) -> WeightTransaction:
        """Open a transaction over the resident tensors."""

    def digest_roots(self, names: Sequence[str]) -> dict[str, bytes]:
        """Compute tensor roots (model_digest.tensor_root) of the resident bytes, under the names given, aliases
        included. Leaves out tensors whose bytes differ between ranks."""

    def prepare_commit(self, record: SessionRecord) -> None:
        """Compute everything that a commit needs from other ranks. If it raises, the session is rolled back."""

    def publish(self, record: SessionRecord) -> None:
        """Make a commit visible. If it raises, the commit is taken back."""

    def unpublish(self) -> None:
        """Take the last `publish` back: its commit is reverted, or another rank failed to publish. The old bytes are
        already restored."""

    def on_rollback(self, why: str, is_poisoned: bool) -> None:
        """Record a rollback. is_poisoned: the old bytes could not be restored, or were poisoned before."""

    def on_dropped(self) -> None:
        """Record a session that ended before it wrote anything."""

    def on_expired(self) -> None:
        """Record that the session which was rolled back last has lost its client."""

    def on_lease_over(self) -> None:
        """Roll back, on all ranks, a session of several ranks whose lease has expired. Runs in a thread of its own,
        without the manager's lock, and again after a pause while the session is open. Where this does nothing, the
        manager's next call finds the expired session."""
