"""An engine in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ....rollout.ahead.rollouts import AheadCounts
from ....rollout.completion import Completion
from ....rollout.sampling_params import SamplingParams
from ...push.remote_engine import RemoteEngine
from .engine import StepPrompts, by_prompt
from .pushed import PushedEngine

_TIMEOUT_S = 3600.0  # of calls that wait for samples


class SeparateEngine(PushedEngine):
    """An engine in a process of its own, which goes on while the trainer trains."""

    _target: RemoteEngine

    def _open(self, folder: Path, socket: Path) -> None:
        config = self._config
        settings = {k: v for k, v in asdict(config.engine_config()).items() if v is not None}
        settings["dtype"] = config.model.dtype
        on_commit = "keep" if config.run.replay_schedule else config.rollout.on_commit
        options = ["--on-commit", on_commit]
        options += ["--max-lag", str(config.rollout.max_lag)] if on_commit == "drop" else []
        self._target = RemoteEngine(folder, socket.parent, socket.stem, settings, options)
        self._exit.callback(self._target.close)

    def generate(
        self, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams] | SamplingParams
    ) -> list[Completion]:
        """See `JobEngine.generate`."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return self._target.generate(list(prompts), [asdict(p) for p in each], _TIMEOUT_S)

    def begin(self, step: int, asked: StepPrompts) -> None:
        """See `JobEngine.begin`."""
        self._target.begin(step, asked.prompts, [asdict(p) for p in asked.params], asked.schedule, _TIMEOUT_S)

    def settle(self) -> None:
        """See `JobEngine.settle`."""
        self._target.settle(_TIMEOUT_S)

    def groups(self, step: int, num_groups: int) -> Iterator[list[Completion]]:
        """See `JobEngine.groups`. Those that are there come in one call, which waits for a step of the engine."""
        index = 0
        while index < num_groups:
            for group in by_prompt(self._target.finish_groups(step, index, _TIMEOUT_S)):
                yield group
                index += 1

    def counts(self) -> AheadCounts:
        """See `JobEngine.counts`."""
        return self._target.counts(self._config.weights.timeout_s)
