"""The verbs of an engine that only the service around it calls: weights and their versions, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from ..loop.between_steps import BetweenSteps
from ..loop.commands import CommitReport, HoldReport
from ..loop.gate import StepGate
from ..loop.parts import Parts
from .driver import Driver


class EngineWeights:
    """Weights and KV memory of one engine, between its steps.

    Every method may be called from any thread and on every rank of a replica; what it says holds when it returns.
    """

    def __init__(self, parts: Parts, driver: Driver, gate: StepGate, between_steps: BetweenSteps) -> None:
        self._model, self._sequences = parts.model, parts.sequences
        self._driver, self._gate, self._between_steps = driver, gate, between_steps

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by Hugging Face name, tied ones once."""
        return self._model.resident_tensors()

    # -- versions ---------------------------------------------------------------------------------------------------

    def commit_weights(
        self,
        version: str,
        digest: str | None,
        *,
        lift: Iterable[str] = ("torn",),
        refuse: Mapping[str, str] | None = None,
    ) -> CommitReport:
        """From here on tokens are sampled from weights of this version; starts a KV epoch.

        version and digest are opaque here. Cached blocks and pins are dropped; refusals under the keys of `lift` end,
        and those of `refuse` (why by key) begin. Running sequences go on, on their KV.
        """
        keys, added = tuple(lift), dict(refuse or {})
        return self._driver.command(
            "commit_weights", lambda: self._between_steps.commit_weights(version, digest, keys, added)
        )

    def relabel_weights(self, version: str) -> None:
        """Tokens from here on bear this version; the weights, and their KV, are the same."""
        self._driver.command("relabel_weights", lambda: self._between_steps.relabel_weights(version))

    def set_weight_digest(self, digest: str) -> None:
        """The digest of the version that is committed, computed later. Starts no epoch."""
        with self._driver.lock:
            self._sequences.weight_digest = digest

    # -- whether steps may run --------------------------------------------------------------------------------------

    def hold_for_update(
        self,
        *,
        refusal: tuple[str, str] | None = None,
        before_sampling: Callable[[], None] | None = None,
        abort_all: bool = False,
        keep_running: bool = False,
        timeout_s: float | None = None,
    ) -> HoldReport:
        """Run no step while weights are written: with a `refusal` (key, why) until a commit lifts it or
        `allow_sampling` does, else until `before_sampling` was called, by whoever wants the next step.

        Raises NotIdle, naming the remedies, while requests are running or queued, unless they are aborted, or paused
        by retract, or paused in_place with `keep_running`: then they go on with the new weights.
        """
        return self._driver.command(
            "hold_for_update",
            lambda: self._between_steps.hold(refusal, before_sampling, abort_all, keep_running),
            None,
            timeout_s,
        )

    def refuse_sampling(self, why: str, key: str = "torn") -> None:
        """Run no step until a weight commit lifts `key`, or `allow_sampling` does. `why` is what a step raises."""
        self._driver.command("refuse_sampling", lambda: self._gate.refuse(key, why))

    def allow_sampling(self, key: str) -> None:
        """Lift the refusal under that key, if there is one."""
        self._driver.command("allow_sampling", lambda: self._gate.lift([key]))

    @property
    def before_sampling(self) -> Callable[[], None] | None:
        """What has to be called before the next step, by whoever wants it, without the engine's lock; no step runs
        before this is None again. Where it raises SamplingRefused requests wait."""
        return self._gate.before_sampling

    @before_sampling.setter
    def before_sampling(self, call: Callable[[], None] | None) -> None:
        self._gate.before_sampling = call
        self._driver.kick()

    # -- memory -----------------------------------------------------------------------------------------------------

    def release_weights(self) -> int:
        """Give the weights' memory back where the engine owns it; returns the bytes. Raises NotIdle while sequences
        hold blocks."""
        return self._driver.command("release_weights", self._between_steps.release_weights)

    def resume_weights(self) -> int:
        """Allocate the weights again, with undefined values; returns the bytes. Does nothing when they are there."""
        return self._driver.command("resume_weights", self._model.resume_weights)

    def release_kv(self) -> int:
        """Give the KV pool's memory back; returns its bytes. Raises NotIdle while sequences hold blocks."""
        return self._driver.command("release_kv", self._between_steps.release_kv)

    def resume_kv(self) -> int:
        """Allocate the KV pool again; returns its bytes. Does nothing when it is there."""
        return self._driver.command("resume_kv", self._between_steps.resume_kv)
