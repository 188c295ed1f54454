"""An engine in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ....rollout.ahead.rollouts import AheadCounts
from ....rollout.completion import Completion
from ....rollout.control.desk.intake import Prompt
from ....rollout.sampling_params import SamplingParams
from ...failures import RESUME, EngineFailed, OtherRankFailed
from ...push.failures import PushFailed
from ...push.remote_engine import RemoteEngine
from .engine import StepPrompts, by_prompt
from .pushed import PushedEngine, reported_losses

_TIMEOUT_S = 3600.0  # of calls that wait for samples


class SeparateEngine(PushedEngine):
    """An engine in a process of its own, which goes on while the trainer trains."""

    _target: RemoteEngine

    @reported_losses()
    def _open(self, folder: Path, socket: Path) -> None:
        config = self._config
        settings = {k: v for k, v in asdict(config.engine_config()).items() if v is not None}
        settings["dtype"] = config.model.dtype
        on_commit = "keep" if config.run.replay_schedule else config.rollout.on_commit
        options = ["--on-commit", on_commit]
        options += ["--max-lag", str(config.rollout.max_lag)] if on_commit == "drop" else []
        self._target = RemoteEngine(folder, socket.parent, socket.stem, settings, options)
        self._exit.callback(self._target.close)

    @reported_losses()
    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | SamplingParams
    ) -> list[Completion]:
        """See `JobEngine.generate`."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        with self.generating():
            return self._target.generate(list(prompts), [asdict(p) for p in each], _TIMEOUT_S)

    @reported_losses()
    def begin(self, step: int, asked: StepPrompts) -> None:
        """See `JobEngine.begin`."""
        self._target.begin(step, asked.prompts, [asdict(p) for p in asked.params], asked.schedule, _TIMEOUT_S)

    @reported_losses()
    def settle(self) -> None:
        """See `JobEngine.settle`."""
        self._target.settle(_TIMEOUT_S)

    def groups(self, step: int, num_groups: int) -> Iterator[list[list[Completion]]]:
        """See `JobEngine.groups`. A call waits for a step of the engine."""
        index = 0
        while index < num_groups:
            with self.generating(), reported_losses():
                found = self._target.finish_groups(step, index, _TIMEOUT_S)
            groups = by_prompt(found)
            index += len(groups)
            yield groups

    @reported_losses()
    def counts(self) -> AheadCounts:
        """See `JobEngine.counts`."""
        return self._target.counts(self._config.weights.timeout_s)

    def loss(self) -> str | None:
        """See `JobEngine.loss`."""
        lost = self._target.loss()
        return None if lost is None else f"{self._target.name}: {lost}"

    def _report_loss(self, error: PushFailed) -> None:
        """See `PushedEngine._report_loss`."""
        ranks, lost = self._ranks, self.loss()
        first = ranks.num_ranks - int(ranks.largest(0 if lost is None else ranks.num_ranks - ranks.rank))
        if first == ranks.num_ranks:
            return
        if first == ranks.rank:
            raise EngineFailed(f"{lost}; {RESUME}") from error
        raise OtherRankFailed(str(error)) from error
