"""The call that comes before the next step: it commits a pending weight update, say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ..errors import DeadlineExceeded
from ..loop.gate import StepGate
from ..model.hosted_model import HostedModel


class BeforeSampling:
    """Run the gate's `before_sampling` where a step is about to run. It may wait for threads that need the engine's
    lock, so the caller does not hold it."""

    def __init__(self, model: HostedModel, gate: StepGate, has_work: Callable[[], bool]) -> None:
        """Create it. has_work: whether requests wait or run."""
        self._model, self._gate, self._has_work = model, gate, has_work

    def run(self) -> None:
        """Run it in a rollout phase. Raises SamplingRefused where it cannot succeed yet."""
        if (call := self._due()) is not None:
            with self._model.rollout_phase():
                call()

    def run_in_phase(self) -> None:
        """Do as `run`, but skip it while the trainer has the module: the next phase is soon enough."""
        if (call := self._due()) is not None:
            with suppress(DeadlineExceeded), self._model.borrowed("the callback before the next step", 0):
                call()

    def _due(self) -> Callable[[], None] | None:
        call = self._gate.before_sampling
        return call if call is not None and self._gate.pause_mode is None and self._has_work() else None
