"""Sessions of weight updates on an engine, as the verbs of a service use them.

    begin -> update ... -> verify -> end        explicit: of full coverage, unless opened for less
    update ... -> commit                        implicit: commits at continue_generation, at resume of the KV cache, or
                                                before the next request is sampled, whichever comes first

Where several ranks hold the model (`replica`) every method but `state`, `is_open` and `release_undo` is called on all
of them, each of which has its part of the tensors; roots are merged, and they vote (`SessionManager`).

No step runs while bytes are written. The order of locks is session, then engine: a thread that holds the engine's lock
never waits for a session (`EngineWeights.before_sampling` is called without it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from ...rollout.engine import Engine
from ...rollout.loop.commands import HoldReport, OnCommit
from ...weight_sync.deadline import Deadline
from ...weight_sync.delta.apply import Check
from ...weight_sync.delta.stream import DeltaManifest
from ...weight_sync.layout.sink import Sink
from ...weight_sync.manifest import TensorSpec
from ...weight_sync.transaction.receiving import Receive
from ...weight_sync.transaction.records import UpdateRecord
from ...weight_sync.transaction.session import SessionManager
from ...weight_sync.transaction.transaction import Coverage, Undo
from .all_ranks import Replica
from .host import AS_A_WHOLE, Commit, EngineHost
from .known_roots import KnownRoots, ReleasedWeights
from .metrics import WeightMetrics, path_of
from .options import DigestTime, UpdateOptions, check_version
from .rank_weights import ReplicaWeights

T = TypeVar("T")


class WeightSessions:
    """Connect an engine and a `SessionManager`."""

    def __init__(
        self,
        engine: Engine,
        timeout_s: float,
        replica: Replica,
        *,
        commit_before_sampling: Callable[[], None],
        on_lease_over: Callable[[], None],
        end_pause: Callable[[str], object],
    ) -> None:
        """Make the manager. Raises ValueError where ranks share the model in a way in which its digest cannot be
        computed.

        timeout_s: how long a call waits for another running call. commit_before_sampling: `commit_implicit` on all
        ranks. on_lease_over: rolls back a session of several ranks whose lease has expired. end_pause: ends the pause
        of a client.
        """
        self._engine, self._replica = engine, replica
        self.weights = ReplicaWeights(engine, replica)
        self.metrics = WeightMetrics()
        self._roots = KnownRoots(engine, self.weights)
        self._host = EngineHost(
            engine, replica, self.weights, self._roots, commit_before_sampling, on_lease_over, end_pause
        )
        self._released: ReleasedWeights | None = None  # the last ones
        self._resumed_in: int | None = None  # the epoch in which memory of weights was allocated last
        self._manager = SessionManager(self._host, peers=replica.peers, lock_timeout_s=timeout_s, as_a_whole=AS_A_WHOLE)

    # -- explicit sessions ------------------------------------------------------------------------------------------

    def begin(
        self,
        coverage: Coverage,
        undo: Undo,
        digest: DigestTime,
        lease_s: float | None,
        options: UpdateOptions,
        check: Callable[[], None] = lambda: None,
    ) -> HoldReport:
        """Open an explicit session and stop sampling. Where requests run, or `check` raises, no session is opened."""
        if digest not in ("now", "later"):
            raise ValueError(f'digest must be "now" or "later", not {digest!r}')
        reports: list[HoldReport] = []
        version, client, timeout_s = options.weight_version, options.client, options.timeout_s
        deadline = Deadline.within(timeout_s)

        def prepare() -> None:
            check()
            reports.append(self._host.hold_for_session(digest, options.within(deadline)))

        with self.metrics.attempt("begin"):
            self._manager.begin(version, coverage, undo, lease_s, prepare, client, timeout_s)
        return reports[0]

    def verify(self, digests: Mapping[str, str], client: str | None = None, timeout_s: float | None = None) -> None:
        """Compare the written tensors with the sender's digests; see `SessionManager.verify`."""
        with self.metrics.attempt("verify"):
            self._manager.verify(digests, timeout_s, client)
        self.metrics.verified(len(digests))

    def end(
        self,
        version: str | None,
        in_flight: OnCommit | None = None,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> Commit:
        """Commit the open session. Raises SessionError where none is open, ValueError for a version that is none."""
        check_version(version)
        commits: list[Commit | None] = []
        with self.metrics.attempt("commit"):
            self._manager.commit(
                version, timeout_s, lambda: self._host.verify_in_flight(in_flight), client,
                lambda: commits.append(self._host.last_commit),
            )  # fmt: skip
        [commit] = commits
        assert commit is not None
        return commit

    def abort(
        self,
        why: str,
        *,
        is_lost: bool = False,
        only_expired: bool = False,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Roll back the open session and restore every byte. is_lost: without its client, whose own call may follow.
        only_expired: only where its lease is over. client: only that of this client. Raises SessionError where none is
        open."""
        self._manager.rollback(why, timeout_s, is_lost=is_lost, only_expired=only_expired, client=client)

    def on_expired(self) -> None:
        """Continue generation that the lost client of the last session had paused; see `SessionHost`."""
        self._host.on_expired()

    def revert(self, client: str | None = None, timeout_s: float | None = None) -> str:
        """Take the last commit back, of this client if it is named, with its weights, version and digest. Returns the
        version that is current again.

        Raises SessionError where its undo data is not kept any more, or a session is open.
        """
        self.finish_digest()  # else another thread could compute it while the bytes change
        return self._host.revert(lambda *held: self._manager.revert(timeout_s, client, *held))

    def when_rolled_back(self, call: Callable[[], None]) -> None:
        """Have `call` run where a session is rolled back, whose sender may be gone."""
        self._host.rolled_back = call

    def release_undo(self) -> None:
        """Free the undo data of the last commit, which then cannot be reverted."""
        self._manager.release_undo()

    # -- updates ----------------------------------------------------------------------------------------------------

    def update(
        self,
        source: str,
        receive: Receive,
        options: UpdateOptions,
        folder: str | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> UpdateRecord:
        """Write through the open session, or through an implicit one, which is committed before the next sampling.
        folder: the one that is read, if it is one. look: called before requests are aborted for it; may raise."""
        received: list[str] = []

        def receive_noted(sink: Sink) -> Sequence[TensorSpec]:
            specs = receive(sink)
            self._host.finish_copies()
            received.extend(spec.name for spec in specs)
            self._roots.was_written(received)
            self._host.reads = folder
            return specs

        def prepare() -> None:
            look()
            self._host.hold_for_update(options.within(deadline))

        if options.in_flight is not None and self.is_open:
            raise ValueError("in a session end_weight_update has in_flight")
        path, verify, deadline = path_of(source), options.verify, Deadline.within(options.timeout_s)
        with self.metrics.update(path):
            record = self._manager.update(
                source, receive_noted, options.weight_version, verify, options.timeout_s,
                prepare, options.client, options.is_whole,
            )  # fmt: skip
        self.metrics.written(path, record.num_bytes, record.seconds, len(set(received) & set(verify or {})))
        return record

    def commit_implicit(self, timeout_s: float | None = None, *, or_roll_back: bool = False) -> None:
        """Commit the open implicit session, if there is one, after a running update has ended. Raises as
        `SessionManager.commit`. or_roll_back: it is rolled back where it cannot be committed."""
        with self.metrics.attempt("commit"):
            self._manager.commit_implicit(timeout_s, or_roll_back=or_roll_back)

    def end_implicit(self, why: str) -> None:
        """Commit or roll back an implicit session whose client is lost; see `SessionManager.end_implicit`."""
        self._manager.end_implicit(why)

    @property
    def is_open(self) -> bool:
        """Whether an explicit session is open."""
        return self._manager.is_explicit

    @property
    def client(self) -> str | None:
        """The name of the open session's client; None: it has none, or none is open."""
        return self._manager.client

    def check_client(self, client: str | None) -> None:
        """Raise SessionError where a call of this client does not belong to the session that is open, if one is."""
        self._manager.check_client(client)

    def settled_client(self) -> str | None:
        """Return the client of the open session, once no call of it runs. Raises SessionBusy where one runs too
        long."""
        return self._manager.settled_client()

    def forget_abort(self) -> None:
        """Note that generation is paused for another update; see `SessionManager.forget_abort`."""
        self._manager.forget_abort()

    @property
    def opened_at(self) -> float | None:
        """The moment at which the open explicit session began, of time.monotonic; None: there is none."""
        return self._manager.opened_at

    def name_version(
        self, version: str, client: str | None, prepare: Callable[[], None], timeout_s: float | None = None
    ) -> None:
        """Set the version of the open session, or else of the current weights. prepare: called right before. Raises
        SessionError, before it, where the session is not this client's."""
        self._manager.name_version(version, self._engine.weights.relabel_weights, timeout_s, client, prepare)

    # -- digests ----------------------------------------------------------------------------------------------------

    @property
    def owes_digest(self) -> bool:
        """Whether the last commit left its digest for later."""
        return self._roots.owes_digest

    def finish_digest(self) -> str | None:
        """Compute the digest that a commit left for later, if one is owed. Returns the digest of the present
        weights."""
        return self._roots.finish_digest()

    def model_digest(self) -> str:
        """Compute the digest of the weights as they are now, over all ranks. Changes nothing."""
        return self._roots.model_digest()

    def present_digest(self, *, anew: bool) -> str:
        """Compute the digest of the present weights, over all ranks, and set it where they had none; see
        `WeightVerbs.present_digest`."""
        roots = self._roots
        return self._manager.between_sessions(
            "present_digest", roots.check_published, lambda: roots.present_digest(anew=anew)
        )

    def look(self) -> tuple[str | None, list[str]]:
        """Compare the weights as they are now with the published ones; see `KnownRoots.look`."""
        return self._roots.look()

    def require_base(self, delta: DeltaManifest, check: Check, folder: Path) -> None:
        """Check that a delta fits the weights as they are now; see `EngineHost.require_base`."""
        self._host.require_base(delta, check, folder)

    # -- writers beside the sessions ----------------------------------------------------------------------------------

    def let_write(self, who: str) -> None:
        """Prepare for writes of the weights outside of sessions, before or after they happen. Known digests and kept
        undo data become invalid. Raises SessionError while a session is open."""
        self.without_session(who, lambda: None)

    def without_session(self, who: str, action: Callable[[], T]) -> T:
        """Prepare as `let_write` does and run the action; until its end no session can be opened."""

        def forget_and_act() -> T:
            self._host.forget_bytes()
            return action()

        return self._manager.without_session(who, forget_and_act)

    def forget_frozen(self) -> None:
        """Forget the digests of frozen parameters too: a trainer has loaded all weights anew."""
        self._host.forget_everything()

    def commit_in_place(
        self, version: str, digest: DigestTime, bytes_copied: int, in_flight: OnCommit | None, *, retracts: bool
    ) -> Commit:
        """Publish weights that were written without a session. Raises SessionError while a session is open."""
        self.let_write("commit_in_place")
        self._roots.owes_digest = False  # the digest of the previous version cannot be computed any more
        value = self._roots.complete() if digest == "now" else None
        self._roots.keep_published()
        self._replica.peers.together("commit_in_place", lambda: None)  # no rank publishes before all can
        return self._host.commit_in_place(version, value, bytes_copied, in_flight, retracts=retracts)

    def change_adapter(self, change: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run a change of the engine's adapter that ends with `commit_adapter`, or puts the former one back. Until its
        end no session can be opened. Raises SessionError while one is open."""
        return self._manager.without_session("an adapter is changed", change, timeout_s, undo_goes_first=False)

    def commit_adapter(self, version: str, in_flight: OnCommit | None = None) -> Commit:
        """Publish the weights after the engine's adapter was changed, in `change_adapter`. Digests of base tensors are
        kept that no update has written since."""
        self.renamed()
        self._host.forget_bytes()
        self._roots.owes_digest = False
        digest = self._roots.complete(trusts_marks=True)
        self._roots.keep_published()
        folder = self._host.folder_now
        commit = self._host.commit_in_place(version, digest, 0, in_flight, retracts=False)  # they are held already
        self._host.folder = None if folder is None else (folder, self._engine.epoch)  # of the base, which stays
        return commit

    def renamed(self) -> None:
        """Note that the engine's tensors have other names."""
        self.weights.renamed()

    # -- memory -----------------------------------------------------------------------------------------------------

    def release_weights(self) -> int:
        """Free the weights' memory where the engine owns it, and return the number of bytes.

        Raises SessionError while a session is open, NotIdle where sequences hold blocks.
        """
        model = self._engine.model

        def free() -> int:
            if not model.holds_weights:  # another call has freed them meanwhile
                return 0
            epoch, version, folder = self._engine.epoch, self._engine.weight_version, self._host.folder_now
            digest, num_bytes = self._roots.release(asks_digest=folder is not None)  # to know them again
            self._host.forget_bytes()
            self._engine.weights.set_weight_digest(None)
            self._released = None if folder is None else ReleasedWeights(version, digest, folder, epoch)
            return num_bytes

        if not (model.owned and model.holds_weights):
            return 0
        # Not in a session, whose undo data would keep the memory, and which would write where nothing is any more.
        return self._manager.without_session("release_memory_occupation", free)

    def resume_weights(self) -> int:
        """Allocate the weights' memory again, and return the number of bytes. Their values are undefined, so all have
        to be written first."""
        if not self._engine.model.holds_weights:
            self._host.refuse_until_written()  # a step could run with what they hold as soon as they are allocated
        num_bytes = self._engine.weights.resume_weights()
        if num_bytes:
            self._resumed_in = self._engine.epoch
            self.weights_were_lost(set(self.weights.parameter_names()))  # buffers were not released
        return num_bytes

    def weights_were_lost(self, names: set[str]) -> None:
        """Mark these tensors undefined on all ranks. Sampling is refused until each has been written again."""
        lost = {name for own in self._replica.gather(sorted(names)) for name in own}
        self._host.weights_were_lost(lost & set(self.weights.names()))

    @property
    def released(self) -> ReleasedWeights | None:
        """The weights from a folder whose memory was released; None: there were none, or others have come since."""
        found = self._released
        return found if found is not None and found.epoch == self._engine.epoch else None

    @property
    def loss(self) -> str | None:
        """The reason why requests wait although all memory is allocated again: the weights hold nothing since.

        None: they do not wait, an update is under way, or the KV pool is released, which trainers resume after their
        update. Nor is it a loss where a trainer has reset the weights itself.
        """
        was_released = self._resumed_in == self._engine.epoch and self._engine.kv_bytes > 0
        return self._host.loss if was_released and self.state()["state"] != "open" else None

    def close(self) -> None:
        """Roll back an open session on this rank, and free the undo data of the last commit."""
        self._manager.close("the service was closed")
        self.release_undo()

    def state(self) -> dict[str, object]:
        """Return the data of the state report. Does not wait."""
        commit = self._host.last_commit
        return self._manager.state() | {
            "num_undefined": len(self._roots.undefined),
            "last_commit": None if commit is None else asdict(commit),
        }
