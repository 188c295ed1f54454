"""The known tensor roots of an engine's weights, and the model digest over them.

_committed   roots of the committed weights: published, or computed for a digest
_fresh       roots of tensors that the open session wrote, where their digest was asked for
_frozen      roots of a trainer's frozen parameters, with marks that show whether they were written since
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...rollout.engine import Engine
from ...rollout.errors import MemoryReleased
from ...weight_sync.errors import DigestMismatch, SessionError
from .published_parts import PublishedParts
from .rank_weights import ReplicaWeights

_RELEASED = "the weights are released: they have no digest"


@dataclass(frozen=True)
class ReleasedWeights:
    """The weights whose memory was released, and that came from a folder."""

    version: str
    digest: str | None  # None: it was never computed
    folder: str  # that held them
    epoch: int  # of the engine, in which they were its weights


class KnownRoots:
    """Keep roots and compute those that are missing. Where several ranks hold the model, every method that computes
    is called on all of them."""

    def __init__(self, engine: Engine, weights: ReplicaWeights) -> None:
        self.owes_digest = False  # the last commit left its digest for later
        self.undefined: frozenset[str] = frozenset()  # tensors with undefined values: released or reset
        self._engine, self._weights = engine, weights
        self._digesting = threading.Lock()  # held while others may not free the bytes; taken after the session's lock
        self._committed: dict[str, bytes] = {}  # by resident name
        self._fresh: dict[str, bytes] = {}  # by resident name
        self._frozen: dict[str, tuple[object, bytes]] = {}  # by resident name: mark and root
        self.num_forgotten = 0  # times that the committed roots were forgotten
        self._epoch = engine.epoch  # of the last commit that is known here
        self._parts = PublishedParts()

    # -- digests ----------------------------------------------------------------------------------------------------

    def finish_digest(self) -> str | None:
        """Compute the digest that a commit left for later, if one is owed. Returns the digest of the present
        weights."""
        with self._digesting:
            self._forget_if_committed_elsewhere()
            if self.owes_digest and not self.undefined:
                owed_by = self.num_forgotten
                digest = self.complete()
                # Not that of bytes which a trainer has begun to write meanwhile.
                if self._engine.weights.set_weight_digest(digest, still=lambda: owed_by == self.num_forgotten):
                    self.owes_digest = False
        return self._engine.weight_digest

    def complete(self, *, trusts_marks: bool = False) -> str:
        """Compute the committed roots that are missing, and return the model digest. Those of a trainer's frozen
        parameters are computed once. trusts_marks: so are those of an engine's own ones, which only updates write."""
        self._forget_if_committed_elsewhere()
        marks = self._weights.frozen_marks(of_owned=trusts_marks)
        known = {name: root for name, (mark, root) in self._frozen.items() if marks.get(name) == mark}
        began = self.num_forgotten
        roots = known | self._committed
        roots |= self._missing(roots)
        if began == self.num_forgotten:
            self._committed = roots
            # Of no others: what is trained meanwhile may be frozen again, with a mark from before.
            self._frozen = {name: (mark, roots[name]) for name, mark in marks.items()}
        return self._weights.model_digest(roots)

    def model_digest(self) -> str:
        """Compute the digest of the weights as they are now, over all ranks. Changes nothing. Raises MemoryReleased
        where there are none."""
        with self._digesting:
            if not self._engine.model.holds_weights:
                raise MemoryReleased(_RELEASED)
            return self._weights.model_digest(self._missing(()))

    def check_published(self) -> None:
        """Raise MemoryReleased or SessionError where the present bytes are not those of the version that was committed
        last: they are released, undefined, or being written."""
        if not self._engine.model.holds_weights:
            raise MemoryReleased(_RELEASED)
        if self.undefined:
            raise SessionError(f"{len(self.undefined)} weights hold nothing: they have no digest")
        if (why := self._engine.refusal) is not None:
            raise SessionError(f"the weights have no digest now: {why}")

    def present_digest(self, *, anew: bool) -> str:
        """Compute the digest of the present weights, and set it where they had none on the first rank, which answers
        requests. anew: also compute where they had one. The caller has called `check_published` and opens no session
        meanwhile. Raises SessionError where they are written meanwhile."""
        engine, began = self._engine, (self._engine.epoch, self.num_forgotten)
        known = self._weights.of_first_rank(engine.weight_digest)
        if known is not None and not anew:
            return str(known)

        def still() -> bool:
            return (engine.epoch, self.num_forgotten) == began and engine.refusal is None

        digest = self.model_digest()
        if known is None and not engine.weights.set_weight_digest(digest, still=still):
            raise SessionError("the weights were written while their digest was computed")
        return digest

    def release(self, *, asks_digest: bool) -> tuple[str | None, int]:
        """Free the weights' memory while no digest is computed. Returns the digest of the weights that it held, None if
        it is not known and not asked for; and the bytes. Raises NotIdle where sequences hold blocks."""
        digest = self.finish_digest()
        with self._digesting:
            if digest is None and asks_digest:
                digest = self.complete()
            return digest, self._engine.weights.release_weights()

    def look(self) -> tuple[str | None, list[str]]:
        """Compare the weights as they are now with the published ones. Changes nothing.

        Returns the model digest, None where ranks that hold the same bytes do not agree; and the tensors of this rank
        that differ from the published ones, as far as their digests were computed.
        """
        names = self._weights.names()
        own, roots = self._weights.digests(names)
        digest = self._weights.model_digest(roots) if len(roots) == len(names) else None
        return digest, self._parts.differing(own, roots, self._committed)

    def have_digest(self, names: Collection[str]) -> bool:
        """Compute whether the weights have the digest of their version still, which covers these. Changes nothing. The
        caller holds the engine's lock, so that no thread frees the bytes."""
        wanted, covered = self._engine.weight_digest, self._weights.names()
        if wanted is None or not set(names) <= set(covered):
            return False
        return self._weights.model_digest(self._weights.digests(covered)[1]) == wanted

    # -- a session --------------------------------------------------------------------------------------------------

    def forget_fresh(self) -> None:
        """Forget every root of the open session."""
        self._fresh = {}

    def was_written(self, names: Iterable[str]) -> None:
        """Forget the open session's roots of tensors that it has written since."""
        for name in names:
            self._fresh.pop(self._weights.resident_name(name), None)

    def of_session(self, names: Sequence[str]) -> dict[str, bytes]:
        """Compute the roots of the tensors that the open session wrote; see `SessionHost.digest_roots`."""
        roots = self._roots_now(names)
        parameters = set(self._weights.names())
        self._fresh |= {name: root for name, root in roots.items() if name in parameters}
        return roots

    def after(self, written: Collection[str]) -> dict[str, bytes]:
        """Return the roots that are known once the open session, which wrote these tensors, is committed."""
        self._forget_if_committed_elsewhere()
        # A tensor that was digested and then restored is not among the written ones.
        fresh = {name: root for name, root in self._fresh.items() if name in written}
        return {name: root for name, root in self._committed.items() if name not in written} | fresh

    def completed(self, roots: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return these roots completed by the missing ones, which are computed. Raises DigestMismatch where ranks
        differ about some."""
        return {**roots, **self._missing(roots)}

    # -- committed weights ------------------------------------------------------------------------------------------

    def publish(self, roots: Mapping[str, bytes], undefined: frozenset[str], owes_digest: bool) -> None:
        """Set the roots of the committed weights."""
        self._committed, self.undefined, self.owes_digest = dict(roots), undefined, owes_digest
        self._frozen = {}
        self.was_committed()
        self.keep_published()

    def was_committed(self) -> None:
        """Note that the engine's last commit is known here: the roots are of its weights."""
        self._epoch = self._engine.epoch

    def _forget_if_committed_elsewhere(self) -> None:
        """Forget the roots where the engine has begun an epoch since: a caller has written weights and committed them
        with `engine.weights.commit_weights`."""
        if self._engine.epoch != self._epoch:
            self.forget(but_frozen=True)
            self.was_committed()

    def forget_names(self, names: Collection[str]) -> None:
        """Forget the committed roots of these tensors: they were written without an update."""
        self._committed = {name: root for name, root in self._committed.items() if name not in names}
        self._frozen = {name: known for name, known in self._frozen.items() if name not in names}

    def keep_published(self) -> None:
        """Keep this rank's part of each committed tensor, and of no others."""
        self._parts.keep(self._committed)

    def forget(self, *, but_frozen: bool = False) -> None:
        """Forget the committed roots: the bytes have changed. but_frozen: a trainer's step changed them, which leaves
        its frozen parameters as they are."""
        self.num_forgotten += 1
        self._committed = {}
        if not but_frozen:
            self._frozen = {}

    def _missing(self, known: Collection[str]) -> dict[str, bytes]:
        """Compute the roots of the parameters that are not known. Raises DigestMismatch where ranks differ about
        some."""
        names = [name for name in self._weights.names() if name not in known]
        found = self._roots_now(names)
        if differing := [name for name in names if name not in found]:
            raise DigestMismatch(differing, "the ranks that hold the same bytes of them do not agree")
        return found

    def _roots_now(self, names: Sequence[str]) -> dict[str, bytes]:
        own, roots = self._weights.digests(names)
        self._parts.saw(own, roots)
        return roots
