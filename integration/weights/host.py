"""The engine as a host of weight-update sessions: holds sampling while a session is open, and publishes its commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...rollout.engine import Engine
from ...rollout.errors import LockstepError, SamplingRefused
from ...rollout.held_signals import Uninterrupted
from ...rollout.loop.commands import HoldReport, OnCommit
from ...weight_sync.delta.apply import Check
from ...weight_sync.delta.stream import DeltaManifest
from ...weight_sync.errors import DigestMismatch, WeightSyncError
from ...weight_sync.transaction.host import SessionHost
from ...weight_sync.transaction.records import SessionRecord
from ...weight_sync.transaction.transaction import Coverage, Undo, WeightTransaction
from .all_ranks import Replica
from .beside import WritesBeside
from .known_roots import KnownRoots
from .options import DigestTime, UpdateOptions
from .rank_weights import ReplicaWeights

logger = logging.getLogger(__name__)

Holding = Callable[[], AbstractContextManager[None]]
AS_A_WHOLE = Uninterrupted()  # for changes of bytes and of their version, which belong together

# The reasons to refuse sampling.
_SESSION, _REVERT, _POISONED, _UNWRITTEN, _TORN = "session", "revert", "poisoned", "unwritten", "torn"


@dataclass(frozen=True)
class Commit:
    """A committed weight version."""

    version: str
    digest: str | None  # None while a digest with digest="later" is not computed yet
    bytes_copied: int
    num_blocks_dropped: int  # cached KV blocks of the version before
    num_unpinned: int  # pinned blocks among them
    session: SessionRecord | None = None  # None: committed in place
    num_verified: int = 0  # sequences that begin again, with their tokens as a draft


@dataclass(frozen=True)
class _Standing:
    """The weights before a commit, as a revert restores them."""

    version: str
    digest: str | None
    undefined: frozenset[str]  # tensors with undefined values
    refusals: Mapping[str, str]  # reasons to refuse sampling from them, which the commit removed
    keeps_running: bool = False  # requests that were paused in_place went on with the commit, and so with its revert
    num_forgotten: int = 0  # of the roots, once the commit is published: grows with a write that has no commit


@dataclass(frozen=True)
class _Prepared:
    """The values that a commit is about to publish."""

    roots: Mapping[str, bytes]
    digest: str | None
    undefined: frozenset[str]
    has_written_alone: bool  # no others have written weights while the session was open


class EngineHost(SessionHost):
    """Stop an engine's sampling while its weights are written, and publish the written weights."""

    def __init__(
        self,
        engine: Engine,
        replica: Replica,
        weights: ReplicaWeights,
        roots: KnownRoots,
        commit_everywhere: Callable[[], None],
        on_lease_over: Callable[[], None],
        end_pause: Callable[[str], object],
    ) -> None:
        """Wrap an engine. commit_everywhere: commits an implicit session on all ranks. on_lease_over: see
        `SessionHost`. end_pause: ends the pause that a client has begun."""
        self._engine, self._replica, self._weights, self._roots = engine, replica, weights, roots
        self._commit_everywhere, self._on_lease_over = commit_everywhere, on_lease_over
        self._end_pause = end_pause
        self.last_commit: Commit | None = None
        self.rolled_back: Callable[[], None] = lambda: None  # called where a session was rolled back
        self._before = _Standing(engine.weight_version, engine.weight_digest, frozenset(), {})
        self._next = _Prepared({}, None, frozenset(), True)
        self._transaction: WeightTransaction | None = None  # of the open session
        self._beside: WritesBeside | None = None  # of the open session
        self._digest_time: DigestTime = "now"
        self._in_flight: OnCommit | None = None  # of the next commit
        self._keeps_running = False  # the next commit lets requests that are paused in_place go on
        self._continues = False  # generation was paused by the client of the last explicit session, for it alone
        self._client: str | None = None  # of the last explicit session, if it has a name
        self.reads: str | None = None  # the folder that the open session has read last
        # The folder of the weights, that an update has read or the engine was made from, and their epoch.
        made_from = engine.model.folder
        self.folder: tuple[str, int] | None = None if made_from is None else (str(made_from), engine.epoch)
        if replica.is_alone:  # several ranks would not forget together
            engine.weights.when_written(roots.forget)
            engine.weights.when_moved(roots.have_digest)

    @property
    def folder_now(self) -> str | None:
        """The folder that the present weights came from; None: there is none."""
        return self.folder[0] if self.folder is not None and self.folder[1] == self._engine.epoch else None

    @property
    def known_digest(self) -> str | None:
        """The digest of the weights as they are now; None: it is not known, as where they were written since."""
        is_written = self._transaction is not None and bool(self._transaction.overwritten)
        is_as_committed = self._before.num_forgotten == self._roots.num_forgotten and not self._roots.undefined
        return self._engine.weight_digest if is_as_committed and not is_written else None

    # -- callbacks of the manager -----------------------------------------------------------------------------------

    def make_transaction(self, coverage: Coverage, undo: Undo) -> WeightTransaction:
        """Open a transaction; see `SessionHost`. A digest that is owed is computed before the next write, or never."""
        self._roots.finish_digest()
        self._roots.forget_fresh()
        self._digest_time, self._keeps_running, self._in_flight = "now", False, None
        self._transaction = self._weights.transaction(coverage, undo)
        self._beside = WritesBeside(self._engine.model)
        self._transaction.before_overwriting = self._beside.look
        return self._transaction

    def digest_roots(self, names: Sequence[str]) -> dict[str, bytes]:
        """Compute tensor roots; see `SessionHost`."""
        return self._roots.of_session(names)

    def prepare_commit(self, record: SessionRecord) -> None:
        """Prepare a commit; see `SessionHost`. The digest needs all ranks and reads all bytes, so it comes before the
        decision."""
        assert self._transaction is not None
        written = set(self._transaction.written_names())
        beside = self._written_beside()
        self._roots.forget_names(beside)
        undefined = self._roots.undefined - written
        roots, digest = self._roots.after(written), None
        if self._digest_time == "now" and not undefined:
            roots = self._roots.completed(roots)
            digest = self._weights.model_digest(roots)
        self._next = _Prepared(roots, digest, undefined, not beside)

    def publish(self, record: SessionRecord) -> None:
        """Publish a commit; see `SessionHost`."""
        engine, ready = self._engine, self._next
        lift = [_SESSION, _POISONED, _UNWRITTEN]
        if record.coverage == "full":
            lift.append(_TORN)
        version = record.version if record.version is not None else engine.weight_version
        digest = engine.weight_digest if ready.has_written_alone else None  # a revert leaves what others wrote
        before = _Standing(engine.weight_version, digest, self._roots.undefined, {}, self._keeps_running)
        report = engine.weights.commit_weights(
            version, ready.digest, lift=lift, refuse=_refusal_of(ready.undefined), in_flight=self._in_flight
        )
        refusals = {key: why for key, why in report.lifted.items() if key != _SESSION}
        self._roots.publish(ready.roots, ready.undefined, owes_digest=ready.digest is None)
        self._before = replace(before, refusals=refusals, num_forgotten=self._roots.num_forgotten)
        if self.reads is not None:
            self.folder = (self.reads, engine.epoch)
        self._transaction, self._beside, self._in_flight, self.reads = None, None, None, None
        engine.weights.before_sampling = None
        self.last_commit = Commit(
            version, ready.digest, record.num_bytes, report.num_blocks_dropped, report.num_unpinned, record,
            report.num_verified,
        )  # fmt: skip

    def unpublish(self) -> None:
        """Take the last publication back; see `SessionHost`. Version and digest are again those before the commit."""
        before, roots = self._before, self._roots
        roots.forget()
        roots.undefined = before.undefined
        self._engine.weights.commit_weights(before.version, before.digest, lift=(), refuse=before.refusals)
        roots.owes_digest = before.digest is None
        roots.was_committed()

    def on_rollback(self, why: str, is_poisoned: bool) -> None:
        """Record a rollback; see `SessionHost`. The engine may sample again, unless the weights are poisoned."""
        is_revert = self._transaction is None  # of a commit: `revert` has looked for what others have written
        written = self._drop_transaction()
        if is_poisoned:
            self._roots.forget()
            why = f"the weights are poisoned ({why}): only a full, verified update in a session heals them"
            self._engine.weights.refuse_sampling(why, _POISONED)
        self.finish_copies()  # of the old bytes
        self._engine.weights.before_sampling = None
        self._engine.weights.allow_sampling(_SESSION, None if is_revert else written)
        self.rolled_back()

    def on_dropped(self) -> None:
        """Record a session without writes; see `SessionHost`."""
        written = self._drop_transaction()
        self._engine.weights.before_sampling = None
        # Sampling was stopped here, and could not be stopped on another rank, or an interrupt came right after it.
        if self._engine.weights.refusal_under([_SESSION]) is not None:
            self._engine.weights.allow_sampling(_SESSION, written)

    def on_expired(self) -> None:
        """Continue generation if the session's client has paused it, and cannot continue any more; see `SessionHost`.

        In a thread of its own: the manager's lock is held here, and other verbs may hold the engine's and wait for it.
        """
        continues, client = self._continues, self._client
        self._continues, self._client = False, None
        if (continues or client is not None) and self._engine.is_controller:
            ending = threading.Thread(target=self._end, args=(continues, client), name="lockstep-continue", daemon=True)
            ending.start()

    def _end(self, continues: bool, client: str | None) -> None:
        logger.warning("the client of a weight update is lost: the pause that it began is ended")
        try:
            if client is not None:
                self._end_pause(client)
            if continues:
                self._engine.continue_generation()
        except LockstepError:
            logger.exception("the pause of a lost client could not be ended")

    def on_lease_over(self) -> None:
        """Roll back an expired session; see `SessionHost`."""
        self._on_lease_over()

    def finish_copies(self) -> None:
        """Wait for the copies that this thread has started. Its stream may be the caller's own, and steps run on
        another one, which does not wait for it."""
        device = self._engine.model.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _drop_transaction(self) -> set[str]:
        """Return the names of the tensors that it alone has written, restored or not."""
        written = self._written_alone()
        self._roots.forget_fresh()
        self._transaction, self._beside, self._in_flight, self.reads = None, None, None, None
        return written

    def _written_alone(self) -> set[str]:
        if self._transaction is None or self._beside is None:
            return set()
        return self._transaction.overwritten - self._beside.names

    def _written_beside(self) -> set[str]:
        """Return the names of tensors that others have written on any rank while the session was open. A collective."""
        look = self._engine.weights.written_beside
        found = self._replica.gather_made("written beside", lambda: look(self._written_alone()))
        return {name for names in found for name in names}

    def require_base(self, delta: DeltaManifest, check: Check, folder: Path) -> None:
        """Check, in an update, that the weights as they are now are those that a delta was made from, or its result, by
        their digest, where the delta has that of its base. Changes nothing; raises DigestMismatch.

        A digest that is not known is not needed where `check` compares the chunks of the delta with digests of their
        own. Else it is computed; where several ranks hold the model, ValueError is raised instead.
        """
        # Of all ranks, the first one alone: it knows the digest of the whole model.
        if delta.base_model_digest is None or self._replica.local_rank != 0:
            return
        digest, result = self.known_digest, delta.manifest.model_digest
        has_chunk_digests = check != "touched"
        if digest is None and not has_chunk_digests:
            if not self._replica.is_alone:
                why = 'the digest of the present weights is not known, to compare it with that of the base: check="pre"'
                raise ValueError(f"{folder}: {why} needs none")
            digest = self._roots.model_digest()
        if digest in (None, delta.base_model_digest, result):
            return
        if result is None and has_chunk_digests:
            return  # it may have been applied already, which its chunks show
        why = f"its base is {delta.base_model_digest}, the present weights are {digest}: send all of them"
        raise DigestMismatch([str(folder)], why)

    # -- the engine -------------------------------------------------------------------------------------------------

    def hold_for_session(self, digest: DigestTime, options: UpdateOptions) -> HoldReport:
        """Stop sampling from begin to end of an explicit session. digest: when the digest of its commit is computed.
        Raises NotIdle where requests run."""
        why = "a weight-update session is open: end it (end_weight_update) or give it up (abort_weight_update)"
        report = self._engine.weights.hold_for_update(
            refusal=(_SESSION, why), abort_all=options.abort_all_requests, keep_running=options.keep_running,
            timeout_s=options.timeout_s,
        )  # fmt: skip
        self._digest_time, self._continues, self._client = digest, options.continue_on_expiry, options.client
        self._keeps_running = options.keep_running
        return report

    def hold_for_update(self, options: UpdateOptions) -> None:
        """Stop sampling for an update of an implicit session, which is committed before the next request is sampled.
        Raises NotIdle where requests run."""
        self._engine.weights.hold_for_update(
            before_sampling=self._commit_before_sampling, abort_all=options.abort_all_requests,
            keep_running=options.keep_running, in_flight=options.in_flight, timeout_s=options.timeout_s,
        )  # fmt: skip
        self._in_flight = options.in_flight or self._in_flight
        self._keeps_running |= options.keep_running

    def verify_in_flight(self, in_flight: OnCommit | None) -> None:
        """Set what the commit that follows does with sequences that have begun. The manager's lock is held."""
        self._in_flight = in_flight

    def revert(self, take_back: Callable[[Holding, Callable[[], object]], object]) -> str:
        """Take the last commit back by `take_back`, which gets the context that holds the sampling meanwhile, and a
        call for its inside on all ranks. Returns the version that is current again. Requests that are paused in_place
        go on with it where they did with the commit."""
        versions: list[str] = []

        def prepare() -> None:
            if not all(self._replica.gather(self._is_as_committed())):
                self._before = replace(self._before, digest=None)  # what was written since is not taken back
            versions.append(self._before.version)

        take_back(self._reverting, prepare)
        return versions[0]

    @contextmanager
    def _reverting(self) -> Iterator[None]:
        """Refuse to sample while a commit is reverted. The manager's lock is held."""
        is_held = False
        try:
            self._engine.weights.hold_for_update(
                refusal=(_REVERT, "a weight update is being reverted"), keep_running=self._before.keeps_running
            )
            is_held = True
            yield
        finally:
            self._engine.weights.allow_sampling(_REVERT, None if is_held else ())

    def _is_as_committed(self) -> bool:
        """Return whether no write without a commit was found since the last commit."""
        has_digest = self._engine.weight_digest is not None or self._roots.owes_digest
        return has_digest and self._before.num_forgotten == self._roots.num_forgotten

    def commit_in_place(
        self, version: str, digest: str | None, bytes_copied: int, in_flight: OnCommit | None, *, retracts: bool
    ) -> Commit:
        """Publish weights that were written without a session. retracts: see `commit_weights`."""
        report = self._engine.weights.commit_weights(
            version, digest, lift=(_TORN,), in_flight=in_flight, retracts=retracts
        )
        self._roots.owes_digest = digest is None
        self._roots.was_committed()
        self.last_commit = Commit(
            version, digest, bytes_copied, report.num_blocks_dropped, report.num_unpinned,
            num_verified=report.num_verified,
        )  # fmt: skip
        return self.last_commit

    def forget_bytes(self) -> None:
        """Forget the digests of the weights that a trainer writes, or has written, without a session."""
        self._roots.forget(but_frozen=True)
        self._transaction = None

    def forget_everything(self) -> None:
        """Forget all digests of the weights."""
        self._roots.forget()

    @property
    def loss(self) -> str | None:
        """The reason why only an update of all weights lets requests run again; None: there is none."""
        return self._engine.weights.refusal_under((_UNWRITTEN, _POISONED))

    def refuse_until_written(self) -> None:
        """Refuse sampling: all weights are about to be allocated, with undefined values."""
        self._engine.weights.refuse_sampling("the weights hold nothing: update them first", _UNWRITTEN)

    def weights_were_lost(self, names: set[str]) -> None:
        """Mark these tensors undefined. Sampling is refused until each has been written again."""
        self._roots.forget()
        self._roots.undefined |= names
        if names:
            self._engine.weights.set_weight_digest(None)
        for key, why in _refusal_of(self._roots.undefined).items():
            self._engine.weights.refuse_sampling(why, key)

    def _commit_before_sampling(self) -> None:
        try:
            self._commit_everywhere()
        except (WeightSyncError, ValueError) as error:
            raise SamplingRefused(f"the weight update under way cannot be committed yet: {error}") from error


def _refusal_of(undefined: Collection[str]) -> dict[str, str]:
    """Return the reason to refuse sampling while these tensors are undefined, by key."""
    if not undefined:
        return {}
    return {_UNWRITTEN: f"{len(undefined)} weights hold nothing since they were released or reset: update them first"}
