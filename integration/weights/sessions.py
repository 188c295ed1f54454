"""Sessions of weight updates on an engine, as the verbs of a service use them.

    begin -> update ... -> verify -> end        explicit: of full coverage, unless opened for less
    update ... -> commit                        implicit: commits at continue_generation, at resume of the KV cache, or
                                                before the next request is sampled, whichever comes first

Where several ranks hold the model (`replica`) every method but `state`, `is_open` and `release_undo` is called on all
of them, each of which has its part of the tensors; roots are merged, and they vote (`SessionManager`).

No step runs while bytes are written. The order of locks is session, then engine: whoever holds the engine's never waits
for a session (`EngineWeights.before_sampling` is called without it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from ...rollout.engine import Engine
from ...rollout.loop.commands import HoldReport
from ...weight_sync.errors import SessionError
from ...weight_sync.layout.sink import Sink
from ...weight_sync.manifest import TensorSpec
from ...weight_sync.transaction.receiving import Receive
from ...weight_sync.transaction.records import UpdateRecord
from ...weight_sync.transaction.session import SessionManager
from ...weight_sync.transaction.transaction import Coverage, Undo
from .all_ranks import Replica
from .host import Commit, EngineHost
from .known_roots import KnownRoots
from .metrics import WeightMetrics, path_of
from .options import DigestTime, UpdateOptions
from .rank_weights import ReplicaWeights


class WeightSessions:
    """Joins an engine and a `SessionManager`."""

    def __init__(
        self,
        engine: Engine,
        timeout_s: float,
        replica: Replica,
        *,
        commit_before_sampling: Callable[[], None],
        on_lease_over: Callable[[], None],
    ) -> None:
        """timeout_s: how long a call waits for another one that is under way. commit_before_sampling: `commit_implicit`
        on all ranks. on_lease_over: gives up the session of several ranks whose time is over. Raises ValueError where
        ranks share the model in a way that its digest cannot be computed."""
        self._engine, self._replica = engine, replica
        self.weights = ReplicaWeights(engine, replica)
        self.metrics = WeightMetrics()
        self._roots = KnownRoots(engine, self.weights)
        self._host = EngineHost(engine, replica, self.weights, self._roots, commit_before_sampling, on_lease_over)
        self._manager = SessionManager(self._host, peers=replica.peers, lock_timeout_s=timeout_s)

    # -- explicit sessions ------------------------------------------------------------------------------------------

    def begin(
        self, coverage: Coverage, undo: Undo, digest: DigestTime, lease_s: float | None, options: UpdateOptions
    ) -> HoldReport:
        """Open one and hold the engine. Where requests run nothing is opened."""
        if digest not in ("now", "later"):
            raise ValueError(f'digest must be "now" or "later", not {digest!r}')
        reports: list[HoldReport] = []
        with self.metrics.attempt("begin"):
            self._manager.begin(
                options.weight_version, coverage, undo, lease_s,
                lambda: reports.append(self._host.hold_for_session(digest, options)),
            )  # fmt: skip
        return reports[0]

    def verify(self, digests: Mapping[str, str]) -> None:
        """Compare what was written with the sender's digests; see `SessionManager.verify`."""
        with self.metrics.attempt("verify"):
            self._manager.verify(digests)
        self.metrics.verified(len(digests))

    def end(self, version: str | None) -> Commit:
        """Commit the open session. Raises SessionError where none is open."""
        with self.metrics.attempt("commit"):
            self._manager.commit(version)
        assert self._host.last_commit is not None
        return self._host.last_commit

    def abort(self, why: str) -> None:
        """Give the open session up: every byte is what it was. Raises SessionError where none is open."""
        self._manager.rollback(why)

    def revert(self) -> str:
        """Take the last commit back: its weights, version and digest; returns the version that stands again.

        Raises SessionError where what it overwrote is not kept any more, or a session is open.
        """
        self.finish_digest()  # or somebody might be at it while the bytes change
        return self._host.revert(self._manager.revert)

    def release_undo(self) -> None:
        """The last commit stands: free what it overwrote."""
        self._manager.release_undo()

    # -- updates ----------------------------------------------------------------------------------------------------

    def update(self, source: str, receive: Receive, options: UpdateOptions) -> UpdateRecord:
        """Write through the open session, or through an implicit one, which whoever samples next commits."""
        received: list[str] = []

        def receive_noted(sink: Sink) -> Sequence[TensorSpec]:
            specs = receive(sink)
            received.extend(spec.name for spec in specs)
            self._roots.was_written(received)
            return specs

        path, verify = path_of(source), options.verify
        with self.metrics.update(path):
            record = self._manager.update(
                source, receive_noted, options.weight_version, verify, options.timeout_s,
                lambda: self._host.hold_for_update(options),
            )  # fmt: skip
        self.metrics.landed(path, record.num_bytes, record.seconds, len(set(received) & set(verify or {})))
        return record

    def commit_implicit(self) -> None:
        """Commit the implicit session that is open, if one is, after the update that is under way. Raises what
        `SessionManager.commit` does."""
        with self.metrics.attempt("commit"):
            self._manager.commit_implicit()

    @property
    def is_open(self) -> bool:
        """Whether an explicit session is open."""
        return self._manager.is_explicit

    def name_version(self, version: str) -> None:
        """The open session, or else the weights that stand, bear this version."""
        if self.state()["state"] == "open":
            self._manager.name_version(version)
        else:
            self._engine.weights.relabel_weights(version)

    # -- digests ----------------------------------------------------------------------------------------------------

    @property
    def owes_digest(self) -> bool:
        """Whether the last commit put its digest off."""
        return self._roots.owes_digest

    def finish_digest(self) -> str | None:
        """Compute the digest that a commit put off, if one is owed; returns that of the weights now."""
        return self._roots.finish_digest()

    def model_digest(self) -> str:
        """Of the weights as they are now, of all ranks. Changes nothing."""
        return self._roots.model_digest()

    def look(self) -> tuple[str | None, list[str]]:
        """Compare the weights as they are now with what was published; see `KnownRoots.look`."""
        return self._roots.look()

    # -- writers beside the sessions ----------------------------------------------------------------------------------

    def let_write(self, who: str) -> None:
        """Somebody else is going to write, or has written, the weights: what is known of their bytes, and what is kept
        of those before, is of no use any more. Raises SessionError while a session is open."""
        if self.state()["state"] == "open":
            raise SessionError(f"{who}: a weight-update session is open: end it or give it up first")
        self.release_undo()
        self._host.forget_bytes()

    def commit_in_place(self, version: str, digest: DigestTime, bytes_copied: int) -> Commit:
        """Publish what was written without us. Raises SessionError while a session is open."""
        self.let_write("commit_in_place")
        self._roots.owes_digest = False  # that of the version before cannot be had any more
        value = self._roots.complete() if digest == "now" else None
        self._roots.keep_published()
        self._replica.peers.together("commit_in_place", lambda: None)  # nobody publishes before everybody can
        return self._host.commit_in_place(version, value, bytes_copied)

    # -- memory -----------------------------------------------------------------------------------------------------

    def release_weights(self) -> int:
        """Give the weights' memory back where the engine owns it; returns the bytes.

        Raises SessionError while a session is open, NotIdle where sequences hold blocks.
        """
        if not (self._engine.model.owned and self._engine.model.holds_weights):
            return 0
        self.finish_digest()
        self.let_write("release_memory_occupation")  # what is kept for a revert would keep the memory, too
        return self._engine.weights.release_weights()

    def resume_weights(self) -> int:
        """Allocate them again; returns the bytes. What they hold is undefined, so all have to be written first."""
        num_bytes = self._engine.weights.resume_weights()
        if num_bytes:
            self.weights_were_lost(set(self.weights.names()))
        return num_bytes

    def weights_were_lost(self, names: set[str]) -> None:
        """Mark these tensors undefined on all ranks. Sampling is refused until each has been written again."""
        lost = {name for own in self._replica.gather(sorted(names)) for name in own}
        self._host.weights_were_lost(lost & set(self.weights.names()))

    def close(self) -> None:
        """Give up what is open on this rank, and free what is kept for a revert."""
        self._manager.close("the service was closed")
        self.release_undo()

    def state(self) -> dict[str, object]:
        """For the state report. Waits for nobody."""
        commit = self._host.last_commit
        return self._manager.state() | {
            "num_undefined": len(self._roots.undefined),
            "last_commit": None if commit is None else asdict(commit),
        }
