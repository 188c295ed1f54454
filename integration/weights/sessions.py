"""Sessions of weight updates on an engine: what is held while one is open, and what its commit publishes.

    begin -> update ... -> verify -> end        explicit: of full coverage, unless opened for less
    update ... -> commit                        implicit: commits at continue_generation, at resume of the KV cache, or
                                                before the next request is sampled, whichever comes first

Where several ranks hold the model (`replica`) every method but `state`, `is_open` and `release_undo` is called on all
of them, each of which has its part of the tensors; roots are merged, and they vote (`SessionManager`).

No step runs while bytes are written. The order of locks is session, then engine: whoever holds the engine's never waits
for a session (`EngineWeights.before_sampling` is called without it).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ...rollout.engine import Engine
from ...rollout.errors import SamplingRefused
from ...rollout.loop.commands import HoldReport
from ...weight_sync.digests.model_digest import model_root
from ...weight_sync.errors import DigestMismatch, Poisoned, SessionError
from ...weight_sync.layout.sink import Sink
from ...weight_sync.manifest import TensorSpec
from ...weight_sync.transaction.peers import PeerFailed
from ...weight_sync.transaction.records import SessionRecord, UpdateRecord
from ...weight_sync.transaction.session import SessionManager
from ...weight_sync.transaction.transaction import Coverage, Undo, WeightTransaction
from .all_ranks import Replica
from .metrics import WeightMetrics, path_of
from .published_parts import PublishedParts
from .rank_weights import ReplicaWeights

DigestTime = Literal["now", "later"]
# Keys of refusals to sample.
_SESSION, _REVERT, _POISONED, _UNWRITTEN, _TORN = "session", "revert", "poisoned", "unwritten", "torn"


@dataclass(frozen=True)
class Commit:
    """A weight version that landed."""

    version: str
    digest: str | None  # None while a digest asked for "later" is owed
    bytes_copied: int
    num_blocks_dropped: int  # cached KV of the version before
    num_unpinned: int  # pinned blocks among them
    session: SessionRecord | None = None  # None: committed in place


@dataclass(frozen=True)
class _Standing:
    """The weights before a commit, as a revert brings them back."""

    version: str
    digest: str | None
    undefined: frozenset[str]  # tensors that held nothing of worth
    refusals: Mapping[str, str]  # to sample from them, which the commit lifted


@dataclass(frozen=True)
class _Prepared:
    """What a commit is about to publish."""

    roots: Mapping[str, bytes]
    digest: str | None
    undefined: frozenset[str]


class WeightSessions:
    """Joins an engine and a `SessionManager`."""

    def __init__(
        self, engine: Engine, timeout_s: float, replica: Replica, commit_before_sampling: Callable[[], None]
    ) -> None:
        """timeout_s: how long a call waits for another one that is under way. commit_before_sampling: `commit_implicit`
        on all ranks. Raises ValueError where ranks share the model in a way that its digest cannot be computed."""
        self._engine, self._replica = engine, replica
        self.weights = ReplicaWeights(engine, replica)
        self._commit_everywhere = commit_before_sampling
        self.metrics = WeightMetrics()
        self._manager = SessionManager(
            self._make_transaction,
            self._publish,
            self._digest_roots,
            on_rollback=self._on_rollback,
            on_dropped=self._on_dropped,
            prepare_commit=self._prepare_commit,
            unpublish=self._unpublish,
            peers=replica.peers,
            on_lease_over=lambda: self.on_lease_over(),
            lock_timeout_s=timeout_s,
        )
        self.on_lease_over: Callable[[], None] = lambda: None  # a session's time is over, and it is several ranks'
        self._digesting = threading.Lock()  # whoever computes a digest that is owed; taken after the session's lock
        self._roots: dict[str, bytes] = {}  # by resident name, of the committed weights, as far as they are known
        self._parts = PublishedParts()
        self._next = _Prepared({}, None, frozenset())
        self._fresh_roots: dict[str, bytes] = {}  # of what the open session wrote, where it was digested
        self._transaction: WeightTransaction | None = None  # of the open session
        self._undefined: frozenset[str] = frozenset()  # what holds nothing of worth, since it was released or reset
        self._digest_time: DigestTime = "now"
        self._before = _Standing(engine.weight_version, engine.weight_digest, frozenset(), {})
        self._commit: Commit | None = None  # the last one
        self.owes_digest = False

    # -- explicit sessions ------------------------------------------------------------------------------------------

    def begin(
        self,
        version: str | None,
        coverage: Coverage,
        undo: Undo,
        digest: DigestTime,
        lease_s: float | None,
        abort_all: bool,
        keep_running: bool,
        timeout_s: float,
    ) -> HoldReport:
        """Open one and hold the engine. Where requests run nothing is opened."""
        if digest not in ("now", "later"):
            raise ValueError(f'digest must be "now" or "later", not {digest!r}')
        why = "a weight-update session is open: end it (end_weight_update) or give it up (abort_weight_update)"
        reports: list[HoldReport] = []

        def hold() -> None:
            reports.append(
                self._engine.weights.hold_for_update(
                    refusal=(_SESSION, why), abort_all=abort_all, keep_running=keep_running, timeout_s=timeout_s
                )
            )
            self._digest_time = digest

        with self.metrics.attempt("begin"):
            self._manager.begin(version, coverage, undo, lease_s, hold)
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
        assert self._commit is not None
        return self._commit

    def abort(self, why: str) -> None:
        """Give the open session up: every byte is what it was. Raises SessionError where none is open."""
        self._manager.rollback(why)

    def revert(self) -> str:
        """Take the last commit back: its weights, version and digest; returns the version that stands again.

        Raises SessionError where what it overwrote is not kept any more, or a session is open.
        """
        self.finish_digest()  # or somebody might be at it while the bytes change
        self._engine.weights.hold_for_update(refusal=(_REVERT, "a weight update is being reverted"))
        try:
            self._manager.revert()
            self._unpublish()
        finally:
            self._engine.weights.allow_sampling(_REVERT)
        return self._before.version

    def release_undo(self) -> None:
        """The last commit stands: free what it overwrote."""
        self._manager.release_undo()

    # -- updates ----------------------------------------------------------------------------------------------------

    def update(
        self,
        source: str,
        receive: Callable[[Sink], Sequence[TensorSpec]],
        version: str | None,
        verify: Mapping[str, str] | None,
        abort_all: bool,
        keep_running: bool,
        timeout_s: float,
    ) -> UpdateRecord:
        """Write through the open session, or through an implicit one, which whoever samples next commits."""

        received: list[str] = []

        def hold() -> None:  # an explicit session holds the engine from begin to end
            self._engine.weights.hold_for_update(
                before_sampling=self._commit_before_sampling, abort_all=abort_all, keep_running=keep_running,
                timeout_s=timeout_s,
            )  # fmt: skip

        def receive_noted(sink: Sink) -> Sequence[TensorSpec]:
            specs = receive(sink)
            for spec in specs:
                self._fresh_roots.pop(self.weights.resident_name(spec.name), None)
                received.append(spec.name)
            return specs

        path = path_of(source)
        with self.metrics.update(path):
            record = self._manager.update(source, receive_noted, version, verify, timeout_s, hold)
        self.metrics.landed(path, record.num_bytes, record.seconds, len(set(received) & set(verify or {})))
        return record

    def commit_implicit(self) -> None:
        """Commit the implicit session that is open, if one is, after the update that is under way. Raises what
        `SessionManager.commit` does."""
        with self.metrics.attempt("commit"):
            self._manager.commit_implicit()

    def _commit_before_sampling(self) -> None:
        try:
            self._commit_everywhere()
        except (SessionError, Poisoned, PeerFailed, ValueError) as error:
            raise SamplingRefused(f"the weight update under way cannot be committed yet: {error}") from error

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

    def finish_digest(self) -> str | None:
        """Compute the digest that a commit put off, if one is owed; returns that of the weights now."""
        with self._digesting:
            if self.owes_digest and not self._undefined:
                self._engine.weights.set_weight_digest(self._model_root())
                self.owes_digest = False
        return self._engine.weight_digest

    def let_write(self, who: str) -> None:
        """Somebody else is going to write, or has written, the weights: what is known of their bytes, and what is kept
        of those before, is of no use any more. Raises SessionError while a session is open."""
        if self.state()["state"] == "open":
            raise SessionError(f"{who}: a weight-update session is open: end it or give it up first")
        self.release_undo()
        self._roots, self._transaction = {}, None

    def commit_in_place(self, version: str, digest: DigestTime, bytes_copied: int) -> Commit:
        """Publish what was written without us. Raises SessionError while a session is open."""
        self.let_write("commit_in_place")
        self.owes_digest = False  # that of the version before cannot be had any more
        value = self._model_root() if digest == "now" else None
        self._parts.keep(self._roots)
        self._replica.together("commit_in_place", lambda: None)  # nobody publishes before everybody can
        report = self._engine.weights.commit_weights(version, value, lift=(_TORN,))
        self.owes_digest = value is None
        self._commit = Commit(version, value, bytes_copied, report.num_blocks_dropped, report.num_unpinned)
        return self._commit

    def model_digest(self) -> str:
        """Of the weights as they are now, of all ranks. Changes nothing."""
        return model_root(self._missing_roots(()).items())

    def look(self) -> tuple[str | None, list[str]]:
        """Of the weights as they are now: the model digest, None where ranks that hold the same bytes do not agree; and
        the names of what is not as it was published on this rank, as far as its digest was computed. Changes nothing.
        """
        names = self.weights.names()
        own, roots = self.weights.digests(names)
        digest = model_root(roots.items()) if len(roots) == len(names) else None
        return digest, self._parts.differing(own, roots, self._roots)

    def _model_root(self) -> str:
        self._roots |= self._missing_roots(self._roots)
        return model_root(self._roots.items())

    def _missing_roots(self, known: Collection[str]) -> dict[str, bytes]:
        """The roots of the parameters that are not known. Raises DigestMismatch where ranks differ about some."""
        names = [name for name in self.weights.names() if name not in known]
        found = self._roots_now(names)
        if differing := [name for name in names if name not in found]:
            raise DigestMismatch(differing, "the ranks that hold the same bytes of them do not agree")
        return found

    def _digest_roots(self, names: Sequence[str]) -> dict[str, bytes]:
        roots = self._roots_now(names)
        parameters = set(self.weights.names())
        self._fresh_roots |= {name: root for name, root in roots.items() if name in parameters}
        return roots

    def _roots_now(self, names: Sequence[str]) -> dict[str, bytes]:
        own, roots = self.weights.digests(names)
        self._parts.saw(own, roots)
        return roots

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
        """These hold nothing of worth, here or on another rank: nothing is sampled before all of them were written."""
        self._roots = {}
        names = {name for own in self._replica.gather(sorted(names)) for name in own}
        self._undefined |= names & set(self.weights.names())
        for key, why in _refusal_of(self._undefined).items():
            self._engine.weights.refuse_sampling(why, key)

    def close(self) -> None:
        """Give up what is open on this rank, and free what is kept for a revert."""
        self._manager.close("the service was closed")
        self.release_undo()

    def state(self) -> dict[str, object]:
        """For the state report. Waits for nobody."""
        commit = None if self._commit is None else asdict(self._commit)
        return self._manager.state() | {"num_undefined": len(self._undefined), "last_commit": commit}

    # -- callbacks of the manager: the session's lock is held ---------------------------------------------------------

    def _make_transaction(self, coverage: Coverage, undo: Undo) -> WeightTransaction:
        self.finish_digest()  # one that is owed is computed before the next write, or never
        self._fresh_roots, self._digest_time = {}, "now"
        self._transaction = self.weights.transaction(coverage, undo)
        return self._transaction

    def _prepare_commit(self, record: SessionRecord) -> None:
        """What the commit will publish: it takes all ranks, and reading all bytes, so it comes before the decision."""
        assert self._transaction is not None
        written = set(self._transaction.written_names())
        undefined = self._undefined - written
        # A tensor that was digested and then put back is not among the written ones.
        fresh = {name: root for name, root in self._fresh_roots.items() if name in written}
        roots = {name: root for name, root in self._roots.items() if name not in written} | fresh
        value = None
        if self._digest_time == "now" and not undefined:
            roots |= self._missing_roots(roots)
            value = model_root(roots.items())
        self._next = _Prepared(roots, value, undefined)

    def _publish(self, record: SessionRecord) -> None:
        engine, ready = self._engine, self._next
        lift = [_SESSION, _POISONED, _UNWRITTEN]
        if record.coverage == "full":
            lift.append(_TORN)
        version = record.version if record.version is not None else engine.weight_version
        before = _Standing(engine.weight_version, engine.weight_digest, self._undefined, {})
        report = engine.weights.commit_weights(version, ready.digest, lift=lift, refuse=_refusal_of(ready.undefined))
        refusals = {key: why for key, why in report.lifted.items() if key != _SESSION}
        self._before = replace(before, refusals=refusals)
        self._roots, self._undefined, self._transaction = dict(ready.roots), ready.undefined, None
        self.owes_digest = ready.digest is None
        self._parts.keep(self._roots)
        engine.weights.before_sampling = None
        self._commit = Commit(
            version, ready.digest, record.num_bytes, report.num_blocks_dropped, report.num_unpinned, session=record
        )

    def _unpublish(self) -> None:
        """The bytes are those of before the last commit: so are version and digest."""
        before, self._roots, self._undefined = self._before, {}, self._before.undefined
        self._engine.weights.commit_weights(before.version, before.digest, lift=(), refuse=before.refusals)
        self.owes_digest = before.digest is None

    def _on_rollback(self, why: str) -> None:
        self._fresh_roots, self._transaction = {}, None
        if self._manager.state()["state"] == "poisoned":
            self._roots = {}
            why = f"the weights are poisoned ({why}): only a full, verified update in a session heals them"
            self._engine.weights.refuse_sampling(why, _POISONED)
        self._engine.weights.before_sampling = None
        self._engine.weights.allow_sampling(_SESSION)

    def _on_dropped(self) -> None:
        self._fresh_roots, self._transaction = {}, None
        self._engine.weights.before_sampling = None
        if not self._replica.is_alone:  # it was held here, and could not be elsewhere
            self._engine.weights.allow_sampling(_SESSION)


def _refusal_of(undefined: Collection[str]) -> dict[str, str]:
    """To sample while these hold nothing of worth: why, by key."""
    if not undefined:
        return {}
    return {_UNWRITTEN: f"{len(undefined)} weights hold nothing since they were released or reset: update them first"}
