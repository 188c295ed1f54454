"""An engine that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ....rollout.completion import Completion
from ....rollout.control.desk.intake import Prompt
from ....rollout.engine import Engine
from ....rollout.ranks.channel import RankChannel
from ....rollout.sampling_params import SamplingParams
from ...service import RolloutService
from ..backends.backend import TrainerBackend
from ..settings.config import JobConfig
from .engine import LocalEngine, StepPrompts, write_gathered
from .sent_prompts import as_json, from_json


class ShardedEngine(LocalEngine):
    """One engine of several ranks. Each rank holds its part of the model, and sends its prompts to the first rank."""

    ranks: RankChannel

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, backend: TrainerBackend
    ) -> None:
        self.service = RolloutService(Engine(model, config.engine_config(), tokenizer=tokenizer))
        self.hosted = self.service.engine.model  # this rank's part; its `trained_module` is the whole model
        self.ranks = self.service.engine.ranks
        self._backend, self._config = backend, config
        self._own_samples: dict[int, slice] = {}  # of the steps that were begun

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | SamplingParams
    ) -> list[Completion]:
        """See `JobEngine.generate`. All ranks of the replica call it together."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        asked, own = self._gather(StepPrompts(list(prompts), list(each)))
        if not asked.params:
            return []
        with self.generating(), self.service.rollout(release_kv=True):
            return self.service.engine.generate(asked.prompts, asked.params)[own]

    def begin(self, step: int, asked: StepPrompts) -> None:
        """See `JobEngine.begin`. All ranks of the replica call it together."""
        asked, self._own_samples[step] = self._gather(asked)
        super().begin(step, asked)

    def _finish(self, step: int) -> list[Completion]:
        """Wait for a step's samples; all ranks of the replica call it together. Returns this rank's."""
        return super()._finish(step)[self._own_samples.pop(step)]

    def _gather(self, asked: StepPrompts) -> tuple[StepPrompts, slice]:
        """Bring the prompts of all ranks of the replica to each of them. Returns them, and which samples are this
        rank's."""
        params = [asdict(p) for p in asked.params]
        own = {"prompts": list(map(as_json, asked.prompts)), "params": params, "schedule": asked.schedule}
        # Rank 0 may call this later than the others: it writes logs.
        brought = self.ranks.gather_json(own, timeout_s=self._config.run.timeout_s)
        num_samples = [sum(plain["n"] for plain in of_rank["params"]) for of_rank in brought]
        first = sum(num_samples[: self.ranks.mesh.local_rank])
        all_ranks = StepPrompts(
            [from_json(prompt) for of_rank in brought for prompt in of_rank["prompts"]],
            [SamplingParams(**plain) for of_rank in brought for plain in of_rank["params"]],
            None if asked.schedule is None else [spans for of_rank in brought for spans in of_rank["schedule"]],
        )
        return all_ranks, slice(first, first + num_samples[self.ranks.mesh.local_rank])

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`."""
        with self.ranks.watch.phase("weight update"):
            return write_gathered(self.service, self._backend, self._config, version)
