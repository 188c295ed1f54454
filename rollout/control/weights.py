"""Weights, versions and memory of an engine, for the service around it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from ..loop.between_steps import BetweenSteps
from ..loop.commands import CommitReport, HoldReport, OnCommit, check_in_flight
from ..loop.gate import StepGate
from ..loop.parts import Parts
from ..model.adapters.folder import AdapterFolder, AdapterLayers
from .driver import Driver


class EngineWeights:
    """Weights and KV memory of one engine, changed between its steps.

    Every method may be called from any thread and on every rank of a replica; its effect holds when it returns.
    """

    def __init__(self, parts: Parts, driver: Driver, gate: StepGate, between_steps: BetweenSteps) -> None:
        self._model, self._sequences = parts.model, parts.sequences
        self._driver, self._gate, self._between_steps = driver, gate, between_steps

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by Hugging Face name, tied ones once."""
        return self._model.resident_tensors()

    # -- versions ---------------------------------------------------------------------------------------------------

    def commit_weights(
        self,
        version: str,
        digest: str | None,
        *,
        lift: Iterable[str] = ("torn",),
        refuse: Mapping[str, str] | None = None,
        in_flight: OnCommit | None = None,
        retracts: bool = False,
    ) -> CommitReport:
        """Commit written weights as a new version and start a KV epoch. New tokens are sampled from this version.

        version and digest are opaque here. Cached blocks and pins are dropped; refusals under the keys of `lift` end,
        and those of `refuse` (reason by key) begin. Running sequences go on with their KV, or with `retracts`
        compute it anew where the weights are others. With `in_flight="verify"` each sequence that has begun is drawn
        again under the new weights, with its tokens as a draft, so that its answer is the one that it would have had
        from the start.
        """
        check_in_flight(in_flight, abort_all=False, keep_running=False)
        keys, added = tuple(lift), dict(refuse or {})
        return self._driver.command(
            "commit_weights",
            lambda: self._between_steps.commit_weights(version, digest, keys, added, in_flight, retracts),
        )

    def replace_adapter(self, adapter: AdapterFolder | AdapterLayers) -> AdapterLayers:
        """Put an adapter into the model, in place of the former one, whose layers are returned; no layers: none.

        The caller holds the sampling, and commits. Raises ValueError for an adapter that does not fit; the model is
        then as before.
        """
        return self._driver.command("replace_adapter", lambda: self._between_steps.replace_adapter(adapter))

    def relabel_weights(self, version: str) -> None:
        """Give the same weights another version, which new tokens bear. KV stays valid."""
        self._driver.command("relabel_weights", lambda: self._between_steps.relabel_weights(version))

    def set_weight_digest(self, digest: str | None, *, still: Callable[[], bool] = lambda: True) -> bool:
        """Set the digest of the committed version, which was computed after the commit; None: the weights are lost.
        Starts no epoch. still: asked under the engine's lock whether it is that version's; returns the answer."""
        with self._driver.lock:
            if is_its := still():
                self._sequences.weight_digest = digest
                self._gate.adapters.digested(digest)
                if digest is not None:
                    self._gate.weights.digested()
        return is_its

    # -- whether steps may run --------------------------------------------------------------------------------------

    def hold_for_update(
        self,
        *,
        refusal: tuple[str, str] | None = None,
        before_sampling: Callable[[], None] | None = None,
        abort_all: bool = False,
        keep_running: bool = False,
        in_flight: OnCommit | None = None,
        timeout_s: float | None = None,
    ) -> HoldReport:
        """Stop the steps while weights are written.

        With a `refusal` (key, reason) they stop until a commit or `allow_sampling` lifts it, otherwise until the next
        step is wanted and `before_sampling` was called. Raises NotIdle, naming the remedies, while requests are running
        or queued, unless they are aborted, or paused by retract, or paused in_place with `keep_running`: then they go
        on with the new weights; or unless the commit is to verify them (`in_flight`).
        """
        return self._driver.command(
            "hold_for_update",
            lambda: self._between_steps.hold(refusal, before_sampling, abort_all, keep_running, in_flight),
            None,
            timeout_s,
        )

    def refuse_sampling(self, why: str, key: str = "torn") -> None:
        """Refuse steps until a weight commit or `allow_sampling` lifts `key`. `why` is the text of a step's error."""
        self._driver.command("refuse_sampling", lambda: self._gate.refuse(key, why))

    def allow_sampling(self, key: str, written: Collection[str] | None = None) -> None:
        """Lift the refusal under that key, if there is one. written: names of the weights that an update has written
        and restored since `hold_for_update`: others that were written meanwhile have no commit. None: all were its."""
        self._driver.command("allow_sampling", lambda: self._gate.lift([key], written))

    def written_beside(self, written: Collection[str]) -> list[str]:
        """Return the names of weights other than these that were written or moved since `hold_for_update`."""
        with self._driver.lock:
            return self._gate.weights.changed(written)

    def refusal_under(self, keys: Iterable[str]) -> str | None:
        """Return the reasons under these keys why steps are refused; None: there are none. Does not wait."""
        return self._gate.refusal_under(keys)

    @property
    def before_sampling(self) -> Callable[[], None] | None:
        """The callback to run before the next step, without the engine's lock; no step runs until it is None again.

        The thread that wants the step calls it. Requests wait if it raises SamplingRefused.
        """
        return self._gate.before_sampling

    @before_sampling.setter
    def before_sampling(self, call: Callable[[], None] | None) -> None:
        self._gate.before_sampling = call
        self._driver.kick()

    def when_written(self, call: Callable[[], None]) -> None:
        """Have `call` run, under the engine's lock, where weights are found that were written without a commit."""
        self._gate.on_written = call

    def when_moved(self, have_digest: Callable[[Sequence[str]], bool]) -> None:
        """Have this decide, under the engine's lock, whether weights of these names that were moved, or written and
        restored, without a commit have the bytes of the committed digest. Digest and KV then stay."""
        self._gate.weights.have_digest = have_digest

    # -- memory -----------------------------------------------------------------------------------------------------

    def release_weights(self) -> int:
        """Free the weights' memory if the engine owns it; returns the bytes. Raises NotIdle while sequences hold
        blocks."""
        return self._driver.command("release_weights", self._between_steps.release_weights)

    def resume_weights(self) -> int:
        """Allocate the weights again, with undefined values; returns the bytes. Does nothing if they are allocated."""
        return self._driver.command("resume_weights", self._between_steps.resume_weights)

    def retract_running(self) -> int:
        """Queue every running sequence again: it keeps its tokens and gives its KV back. Returns their number."""
        return self._driver.command("retract_running", self._between_steps.retract_running)

    def release_kv(self) -> int:
        """Free the KV pool's memory; returns its bytes. Raises NotIdle while sequences hold blocks."""
        return self._driver.command("release_kv", self._between_steps.release_kv)

    def resume_kv(self) -> int:
        """Allocate the KV pool again; returns its bytes. Does nothing if it is allocated. Raises EngineStopped after
        `close`."""
        self._driver.check_open()
        return self._driver.command("resume_kv", self._between_steps.resume_kv)
