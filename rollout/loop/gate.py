"""The gate before each step: pauses, refusals, released memory, and the callback that has to run first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ..errors import MemoryReleased, NotIdle, SamplingRefused
from .adapter_watch import AdapterWatch
from .code_watch import CodeWatch
from .commands import HoldReport, OnCommit, PauseMode
from .loop import Loop
from .parts import Parts
from .weight_watch import WeightWatch


class StepGate:
    """Decide whether the loop may run a step. The caller holds the engine's lock."""

    def __init__(self, parts: Parts, loop: Loop) -> None:
        self.loop = loop
        self.adapters, self.weights = AdapterWatch(parts, loop), WeightWatch(parts, loop)
        self.code = CodeWatch(parts, loop)
        self.pause_mode: PauseMode | None = None  # None: not paused
        self.before_sampling: Callable[[], None] | None = None  # called before the next step; sets this to None
        self.on_written: Callable[[], None] = lambda: None  # called where weights were written without a commit
        self._refusals: dict[str, str] = {}  # the reasons why no step may run, by key
        self._model, self._kv_cache = parts.model, parts.kv_cache
        self._scheduler, self._events = parts.scheduler, parts.ledger.events

    @property
    def refusal(self) -> str | None:
        """The reasons why steps are refused although they are not paused; None: they are not."""
        return self.refusal_under(list(self._refusals))

    def refusal_under(self, keys: Iterable[str]) -> str | None:
        """Return the reasons under these keys; None: there are none."""
        found = map(self._refusals.get, keys)
        return "; ".join(why for why in found if why is not None) or None

    @property
    def can_step(self) -> bool:
        """Whether a step would run any request now."""
        is_free = self.pause_mode is None and not self._refusals and self.before_sampling is None
        has_memory = self._kv_cache.is_allocated and self._model.holds_weights
        return is_free and has_memory and self.loop.has_work

    @property
    def why_not(self) -> str | None:
        """The reason why requests that are here get no step; None: there are none, or a step may run."""
        if not self.loop.has_work:
            return None
        if self.pause_mode is not None:
            return f"generation is paused ({self.pause_mode}), until continue_generation"
        if self._refusals:
            return self.refusal
        if not self._kv_cache.is_allocated:
            return "the KV pool is released"
        if not self._model.holds_weights:
            return "the weights are released"
        if not self._model.in_rollout_phase:
            return "the trainer has the module: steps run inside `with engine.model.rollout_phase()`"
        return None

    def check_weights(self) -> None:
        """Raise MemoryReleased or SamplingRefused where the model must not run with the weights as they are."""
        if not self._model.holds_weights:
            raise MemoryReleased("the weights are released: resume them, and write them, before generating")
        if self._refusals:
            raise SamplingRefused(self.refusal)

    def step(self, most: int = 1) -> None:
        """Run one step, or up to `most` decode steps. Runs nothing while paused, or before `before_sampling` was
        called.

        Raises MemoryReleased or SamplingRefused if there are requests that must not run now.
        """
        if self.pause_mode is not None or self.before_sampling is not None or not self.loop.has_work:
            return
        if not self._kv_cache.is_allocated:
            raise MemoryReleased("the KV pool is released: resume it before generating")
        self.check_weights()
        try:
            has_adapters = bool(self._model.adapters)
            if has_adapters and self.adapters.has_merged():
                self.weights.accept()  # merging adapters writes weights
            if self.weights.look():  # before a switch, which brings the digest of another state back
                self._note_written()
            if has_adapters and self.adapters.look():
                self.code.accept()
            self.code.look()
            self.loop.step(1 if has_adapters else most)  # a switch of adapters is looked for before every step
        finally:
            self._events.flush()

    def _note_written(self) -> None:
        """Forget the digests of weights that were written without a commit."""
        self.adapters.digested(None)
        self.on_written()

    def refuse(self, key: str, why: str) -> None:
        """Refuse steps until `key` is lifted. `why` is the text of a step's error."""
        self._refusals[key] = why

    def lift(self, keys: Iterable[str], written: Collection[str] | None = None) -> dict[str, str]:
        """End the refusals under these keys, if there are any: an update has committed, or has left no trace. Returns
        the ended ones. written: names of the weights that the update has written, or written and restored; where
        others were written meanwhile, they have no commit. None: all changes were the update's."""
        if written is None:
            self.weights.accept()
        else:
            if self.weights.compare(but=written):
                self._note_written()
        return {key: self._refusals.pop(key) for key in keys if key in self._refusals}

    def hold(
        self,
        refusal: tuple[str, str] | None,
        before_sampling: Callable[[], None] | None,
        keep_running: bool,
        in_flight: OnCommit | None = None,
    ) -> HoldReport:
        """Stop the steps while weights are written: with this refusal (key, reason), or until `before_sampling` ran.

        Raises NotIdle, and changes nothing, if live requests would be hit by the change of weights. Requests that wait
        would not, where no step can run before the change: while paused, and where the weights hold nothing or the KV
        pool is released. With `in_flight` none is hit: the commit begins them again.
        """
        num_running, num_waiting = self._scheduler.num_running, self._scheduler.num_waiting
        num_hit = 0 if keep_running and self.pause_mode is not None else num_running
        has_memory = self._kv_cache.is_allocated and self._model.holds_weights
        if self.pause_mode is None and not self._refusals and has_memory:
            num_hit += num_waiting
        if num_hit and in_flight is None:
            raise NotIdle(
                f"{num_running} requests are running and {num_waiting} waiting: abort them (abort_all_requests=True) "
                'or take their KV back first (pause_generation(mode="retract")); paused in_place they can go on with '
                'the new weights (keep_running=True), and the commit can draw their tokens again (in_flight="verify")'
            )
        may_step = self.before_sampling is None and not self._refusals
        if may_step and self.weights.compare():  # no update has written yet
            self._note_written()
        if refusal is not None:
            self.refuse(*refusal)
        if before_sampling is not None:
            self.before_sampling = before_sampling
        return HoldReport(0, num_running, num_waiting)
