"""Whether a step may run: pauses, refusals, released memory, and calls that have to come first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import MemoryReleased, NotIdle, SamplingRefused
from .commands import HoldReport, PauseMode
from .loop import Loop
from .parts import Parts


class StepGate:
    """Lets the loop run steps, or not. Its caller holds the engine's lock."""

    def __init__(self, parts: Parts, loop: Loop) -> None:
        self.loop = loop
        self.pause_mode: PauseMode | None = None  # None: not paused
        self.before_sampling: Callable[[], None] | None = None  # to be called, and to set None, before the next step
        self._refusals: dict[str, str] = {}  # why no step may run, by what has to happen first
        self._model, self._kv_cache = parts.model, parts.kv_cache
        self._scheduler, self._events = parts.scheduler, parts.ledger.events

    @property
    def refusal(self) -> str | None:
        """Why no step may run though nothing is paused; None: it may."""
        return "; ".join(self._refusals.values()) or None

    @property
    def can_step(self) -> bool:
        """Whether a step would run something now."""
        is_free = self.pause_mode is None and not self._refusals and self.before_sampling is None
        has_memory = self._kv_cache.is_allocated and self._model.holds_weights
        return is_free and has_memory and self.loop.has_work

    def step(self) -> None:
        """Run one step. Nothing runs while paused, nor before `before_sampling` was called.

        Raises MemoryReleased or SamplingRefused where there is work that must not run now.
        """
        if self.pause_mode is not None or self.before_sampling is not None or not self.loop.has_work:
            return
        if not self._kv_cache.is_allocated:
            raise MemoryReleased("the KV pool is released: resume it before generating")
        if not self._model.holds_weights:
            raise MemoryReleased("the weights are released: resume them, and write them, before generating")
        if self._refusals:
            raise SamplingRefused(self.refusal)
        try:
            self.loop.step()
        finally:
            self._events.flush()

    def refuse(self, key: str, why: str) -> None:
        """Let no step run until `key` is lifted. `why` is what a step raises."""
        self._refusals[key] = why

    def lift(self, keys: Iterable[str]) -> dict[str, str]:
        """End the refusals under these keys; returns those that there were."""
        return {key: self._refusals.pop(key) for key in keys if key in self._refusals}

    def hold(
        self, refusal: tuple[str, str] | None, before_sampling: Callable[[], None] | None, keep_running: bool
    ) -> HoldReport:
        """Let no further step run, for weights to be written: refuse them under this key and for this reason, or until
        `before_sampling` was called. Raises NotIdle, and changes nothing, where that would pull the weights from under
        requests."""
        num_running, num_waiting = self._scheduler.num_running, self._scheduler.num_waiting
        num_hit = num_running + num_waiting if self.pause_mode is None else 0 if keep_running else num_running
        if num_hit:
            raise NotIdle(
                f"{num_running} requests are running and {num_waiting} waiting: abort them (abort_all_requests=True) "
                'or take their KV back first (pause_generation(mode="retract")); paused in_place they can go on with '
                "the new weights (keep_running=True)"
            )
        if refusal is not None:
            self.refuse(*refusal)
        if before_sampling is not None:
            self.before_sampling = before_sampling
        return HoldReport(0, num_running, num_waiting)
