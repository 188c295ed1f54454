"""Pushes of a trainer's weights to many engines. All engines get the new version, or all keep the old one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...rollout.loop.commands import OnCommit, check_in_flight
from ...weight_sync.deadline import Deadline
from ...weight_sync.digests.model_digest import model_root, tensor_roots
from ...weight_sync.errors import SessionBusy, SessionError, WeightSyncError
from ...weight_sync.layout.bucket import DEFAULT_BUCKET_BYTES
from ...weight_sync.manifest import Manifest, NamedTensors, TensorSpec, specs_of
from ...weight_sync.target import Target, TargetError
from ...weight_sync.transports.transport import Sent, Transport, on_all, raise_failures
from .adapters.trainer_tensors import trainer_specs, trainer_tensors
from .attendance import attended
from .failures import PushFailed, failures_of

logger = logging.getLogger(__name__)

PIECE_BYTES = DEFAULT_BUCKET_BYTES  # of tensors that are read ahead where their names come with them


@dataclass(frozen=True)
class Pushed:
    """Record of a push that was committed."""

    version: str
    digest: str | None  # the model digest as the sender computed it; None without verify
    sent: Sent
    seconds: float


@dataclass
class _Digests:
    """Compute tensor roots of tensors as they are sent."""

    roots: dict[str, bytes] = field(default_factory=dict)

    def passing(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.roots |= tensor_roots([(name, tensor)])
            yield name, tensor


class WeightPusher:
    """Push a trainer's weights: pause, flush, begin, buckets, verify, commit, continue.

    All ranks of the trainer call `push` together, since gathering sharded weights is a collective; the rank that sends
    has the targets, the others have none. `share(error)` sends the sender's error (or None) to all ranks, so that all
    of them raise; a job of one rank needs none.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        transport: Transport | None,
        *,
        verify: bool = True,
        undo: str = "tensors",
        digest: str = "now",
        pause_mode: str = "retract",
        dtype: torch.dtype | None = None,
        timeout_s: float = 120.0,
        share: Callable[[str | None], str | None] = lambda error: error,
    ) -> None:
        """Keep the settings. dtype: the weights are cast to it before they are sent; timeout_s: deadline of every
        single wait."""
        if targets and transport is None:
            raise ValueError("targets need a transport")
        names = [target.name for target in targets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"targets of one name: {', '.join(twice)}")
        self.targets = tuple(targets)
        self._transport = transport
        self._verify, self._undo, self._digest = verify, undo, digest
        self._pause_mode, self._dtype, self._timeout_s = pause_mode, dtype, timeout_s
        self._share = share

    def push(self, model: nn.Module, version: str, *, in_flight: OnCommit | None = None) -> Pushed | None:
        """Send the model's weights to every target as `version`. Returns None on ranks without targets.

        in_flight "verify": requests that have begun are drawn again under the new weights, see `WeightVerbs`. Raises
        PushFailed; then every target that can be reached has its old weights, and continues to generate if it did
        before.
        """
        specs = trainer_specs(model, self._dtype)
        return self.push_tensors(trainer_tensors(model, self._dtype), specs, version, in_flight=in_flight)

    def push_tensors(
        self,
        tensors: NamedTensors,
        specs: Sequence[TensorSpec] | None,
        version: str,
        *,
        in_flight: OnCommit | None = None,
    ) -> Pushed | None:
        """Push tensors that the caller gathers, as `push` does. They are read to the end in any case, in the order of
        `specs`.

        specs None: names and shapes are known only as the tensors come. They are read PIECE_BYTES ahead then, and the
        transport has to take an update in pieces (`Transport.takes_pieces`; ValueError).
        """
        if specs is None and self._transport is not None and not self._transport.takes_pieces:
            raise ValueError(f"{type(self._transport).__name__} needs to know all names and shapes before: pass specs")
        check_in_flight(in_flight, abort_all=self._pause_mode == "abort", keep_running=False)
        tensors = iter(tensors)
        error: Exception | None = None
        pushed = None
        try:
            try:
                if self.targets:
                    pushed = self._push(tensors, specs, version, in_flight)
            finally:
                for _ in tensors:  # the other ranks gather to the end, and would wait for this one
                    pass
        except Exception as failed:  # noqa: BLE001 - any exception has to be sent to the other ranks
            error = failed
        shared = self._share(None if error is None else str(error))
        if error is not None:
            raise error
        if shared is not None:
            raise PushFailed(version, {"the sending rank": shared})
        return pushed

    def close(self) -> None:
        """Release the transport's groups, segments and folders."""
        if self._transport is not None:
            self._transport.close()

    def _push(
        self, tensors: NamedTensors, specs: Sequence[TensorSpec] | None, version: str, in_flight: OnCommit | None
    ) -> Pushed:
        assert self._transport is not None
        try:
            self._transport.prepare(self.targets, self._timeout_s)
        except (WeightSyncError, ValueError) as error:
            raise PushFailed(version, failures_of(error)) from error
        with attended(self.targets, version, self._timeout_s) as targets:
            return self._push_to(targets, tensors, specs, version, in_flight)

    def _push_to(
        self,
        targets: Sequence[Target],
        tensors: NamedTensors,
        specs: Sequence[TensorSpec] | None,
        version: str,
        in_flight: OnCommit | None,
    ) -> Pushed:
        """Push to targets whose calls have the name of this push: what it has begun there it ends, and nothing else."""
        assert self._transport is not None
        started, digests = time.perf_counter(), _Digests()
        self._prepare(targets, version)
        try:
            passing = digests.passing(tensors) if self._verify else tensors
            sent = self._send(targets, passing, specs, version)
            if self._verify:
                roots = {name: root.hex() for name, root in digests.roots.items()}
                raise_failures(on_all(targets, lambda one: self._call(one, "verify_weight_update", digests=roots)))
        except BaseException as error:
            stranded = self._take_back(targets)
            if not isinstance(error, Exception):
                raise
            raise PushFailed(version, failures_of(error), stranded) from error
        self._commit(targets, version, in_flight)
        try:
            self._transport.committed()
            self._tell(targets, "release_weight_undo")
        finally:
            self._tell(targets, "continue_generation")
        digest = model_root(digests.roots.items()) if self._verify else None
        return Pushed(version, digest, sent, time.perf_counter() - started)

    def _send(
        self, targets: Sequence[Target], tensors: NamedTensors, specs: Sequence[TensorSpec] | None, version: str
    ) -> Sent:
        """Send the tensors in one go, or piece by piece where nothing is known of them before."""
        assert self._transport is not None
        if specs is not None:
            return self._transport.send(targets, Manifest(version, tuple(specs)), tensors, self._timeout_s)
        num_bytes = 0
        for piece in pieces_of(tensors, PIECE_BYTES):
            manifest = Manifest(version, specs_of(piece))
            num_bytes += self._transport.send(targets, manifest, piece, self._timeout_s).num_bytes
        return Sent(num_bytes)

    def _prepare(self, targets: Sequence[Target], version: str) -> None:
        """Pause, flush and begin on every target."""
        begun: list[Target] = []  # or, where an interrupt has come, perhaps begun

        def prepare(target: Target) -> None:
            # Paused first: no request may be admitted between the flush and the session.
            self._call(
                target, "pause_generation", mode=self._pause_mode, ttl=2 * self._timeout_s, keeps_other=True
            )  # fmt: skip
            self._call(target, "flush_cache")
            begun.append(target)
            try:
                self._call(
                    target, "begin_weight_update", weight_version=version, undo=self._undo, digest=self._digest,
                    keep_running=self._pause_mode == "in_place", lease_s=2 * self._timeout_s,
                )  # fmt: skip
            except TargetError as error:
                if error.kind:  # its own answer: a session that is open there belongs to another caller
                    begun.remove(target)
                raise

        try:
            failures = on_all(targets, prepare)
            if failures:
                raise PushFailed(version, {name: str(error) for name, error in failures.items()})
        except BaseException:  # an interrupt too leaves no target paused
            self._tell(begun, "abort_weight_update")
            self._tell(targets, "continue_generation")  # ends the pauses of this push alone
            raise

    def _commit(self, targets: Sequence[Target], version: str, in_flight: OnCommit | None) -> None:
        """Commit on every target, or on none. All targets have verified, so a failure now means that a target is
        gone."""
        given = {} if in_flight is None else {"in_flight": in_flight}
        try:
            failures = on_all(targets, lambda target: self._call(target, "end_weight_update", **given))
        except BaseException:  # an interrupt: some targets may have committed
            self._take_back(targets)
            raise
        if failures:
            stranded = self._take_back(targets)
            raise PushFailed(version, {name: str(error) for name, error in failures.items()}, stranded)

    def _take_back(self, targets: Sequence[Target]) -> list[str]:
        """Restore the old weights on every target, and continue generation where possible. Returns the names of the
        targets where that failed."""

        def abort(target: Target) -> None:
            deadline = Deadline.within(self._timeout_s)
            while True:
                try:
                    self._call(target, "abort_weight_update")
                    return
                except TargetError as error:  # busy: with a call of ours, whose answer did not come
                    if error.kind != SessionBusy.__name__ or deadline.has_passed:
                        raise

        def take_back(target: Target) -> None:
            try:
                abort(target)
            except TargetError as error:
                if error.kind != SessionError.__name__:
                    raise
                self._call(target, "revert_weight_update")  # no session of ours is open, so it has committed
            if self._call(target, "state")["weight_update"]["state"] == "poisoned":  # type: ignore[index]
                raise TargetError(target.name, "abort_weight_update", "its weights are poisoned")

        assert self._transport is not None
        self._transport.rejected()
        stranded = on_all(targets, take_back)
        for name, error in stranded.items():
            logger.error("%s: the old weights could not be brought back: %s", name, error)
        self._tell([target for target in targets if target.name not in stranded], "continue_generation")
        return list(stranded)

    def _tell(self, targets: Sequence[Target], verb: str) -> None:
        """Call a verb whose failure does not change the decision; the failure is logged."""
        for name, error in on_all(targets, lambda target: self._call(target, verb)).items():
            logger.warning("%s: %s failed: %s", name, verb, error)

    def _call(self, target: Target, verb: str, **arguments: object) -> dict[str, object]:
        return target.call(verb, timeout_s=self._timeout_s, **arguments)


def pieces_of(tensors: NamedTensors, piece_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Draw the tensors and yield them in lists of at most `piece_bytes`, or of one tensor that has more."""
    piece: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if piece and size + tensor.nbytes > piece_bytes:
            yield piece
            piece, size = [], 0
        piece.append((name, tensor))
        size += tensor.nbytes
    if piece:
        yield piece
