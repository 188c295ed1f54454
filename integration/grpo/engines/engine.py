"""The engine of one rank of the main job: its interface for the job, and the base classes of its kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from ....rollout.ahead.group import Spans
from ....rollout.ahead.rollouts import AheadCounts, OnCommitPolicy, RolloutsAhead
from ....rollout.completion import Completion
from ....rollout.config import EngineConfig
from ....rollout.control.desk.intake import Prompt
from ....rollout.engine import Engine
from ....rollout.model.hosted_model import HostedModel
from ....rollout.ranks.channel import RankChannel
from ....rollout.sampling_params import SamplingParams
from ....weight_sync.transaction.transaction import Undo
from ...activity import Activity
from ...push.adapters.named_tensors import outgoing_specs, unwrapped
from ...ranks import Ranks
from ...service import RolloutService
from ..backends.backend import TrainerBackend
from ..settings.config import JobConfig


@dataclass(frozen=True)
class StepPrompts:
    """One rank's prompts of a step, with the settings of each."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    schedule: Sequence[Sequence[Spans]] | None = None  # of each prompt's samples, where a run is repeated


class JobEngine(ABC):
    """The interface that the job uses of its engine. All ranks call `sync` together."""

    hosted: HostedModel  # the trainer's module with the engine's numerics
    service: RolloutService | None = None  # of an engine in this process; None: the engine has its own process
    ranks: RankChannel | None = None  # between the ranks of an engine that has several
    activity = Activity()  # of this rank; the job sets its own

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | SamplingParams
    ) -> list[Completion]:
        """Complete every prompt with the weights of the last sync."""

    @abstractmethod
    def begin(self, step: int, asked: StepPrompts) -> None:
        """Queue the prompts of a step, which may be a coming one, without waiting; see `RolloutsAhead`."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until a schedule's tokens of the present weights are drawn; before a sync of a run that is repeated."""

    @abstractmethod
    def groups(self, step: int, num_groups: int) -> Iterator[list[list[Completion]]]:
        """Wait for the samples of a step that was begun, a list for each prompt, and yield those that are there by
        then. Iterated to the end."""

    @abstractmethod
    def counts(self) -> AheadCounts:
        """Return what the engine has counted so far."""

    def num_steps(self) -> int:
        """Return a number that grows while the engine generates; a constant where that is not known."""
        return 0

    def generating(self) -> AbstractContextManager[None]:
        """Enclose a wait for samples."""
        return self.activity.of("generating", self.num_steps)

    @abstractmethod
    def sync(self, version: str) -> int:
        """Bring the trainer's weights into the engine as `version`. Returns how many bytes this rank moved."""

    @abstractmethod
    def weight_digest(self) -> str | None:
        """Return the model digest of the engine's weights."""

    def loss(self) -> str | None:
        """Say how this rank's engine was lost, where it has a process of its own; None while it runs."""
        return None

    def announce_step(self) -> AbstractContextManager[None]:
        """Enclose the optimizer's step."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Close the servers, processes and sockets of this engine."""


class LocalEngine(JobEngine):
    """Base class of the engines in this process."""

    service: RolloutService
    _config: JobConfig

    @cached_property
    def _ahead(self) -> RolloutsAhead:
        return rollouts_ahead(self.service.engine, self._config)

    def begin(self, step: int, asked: StepPrompts) -> None:
        """See `JobEngine.begin`."""
        self._ahead.begin(step, asked.prompts, asked.params, schedule=asked.schedule)

    def num_steps(self) -> int:
        """See `JobEngine.num_steps`."""
        return self.service.engine.metrics.num_steps

    def settle(self) -> None:
        """See `JobEngine.settle`."""
        with self.generating(), self.service.rollout(release_kv=True):
            self._ahead.settle()

    def groups(self, step: int, num_groups: int) -> Iterator[list[list[Completion]]]:
        """See `JobEngine.groups`. All are there at once: then the trainer has the process."""
        yield by_prompt(self._finish(step))

    def _finish(self, step: int) -> list[Completion]:
        with self.generating(), self.service.rollout(release_kv=True):
            return self._ahead.finish(step)

    def counts(self) -> AheadCounts:
        """See `JobEngine.counts`."""
        return self._ahead.counts

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | SamplingParams
    ) -> list[Completion]:
        """See `JobEngine.generate`."""
        with self.generating(), self.service.rollout(release_kv=True):
            return self.service.engine.generate(prompts, params)

    def weight_digest(self) -> str | None:
        """See `JobEngine.weight_digest`."""
        return self.service.engine.weight_digest

    def close(self) -> None:
        """See `JobEngine.close`."""
        self.service.close()


class OtherModelEngine(JobEngine):
    """Base class of the engines with a copy of the weights. The trainer's module is hosted for its numerics alone."""

    def __init__(self, config: JobConfig, model: PreTrainedModel, backend: TrainerBackend) -> None:
        self.hosted = HostedModel.adopt(
            model, dtype=None, device=None, invariant=config.engine.invariant, k_blocks=config.engine.k_blocks
        )
        self._specs = outgoing_specs(unwrapped(model))  # before it is sharded
        self._backend = backend
        self._config = config


def by_prompt(completions: list[Completion]) -> list[list[Completion]]:
    """Return the completions of each prompt, the samples of which lie side by side."""
    firsts = [at for at, one in enumerate(completions) if one.index == 0]
    return [completions[at:end] for at, end in pairwise([*firsts, len(completions)])]


def rollouts_ahead(engine: Engine, config: JobConfig) -> RolloutsAhead:
    """Make the queue of an engine's coming steps, as the job's settings say."""
    rollout = config.rollout
    on_commit = cast(OnCommitPolicy, rollout.on_commit)  # checked where it was read
    if config.run.replay_schedule:
        return RolloutsAhead(engine, "keep")  # what was dropped is not drawn again
    return RolloutsAhead(engine, on_commit, rollout.max_lag if on_commit == "drop" else None)


def copied_service(config: JobConfig, folder: Path, ranks: Ranks) -> RolloutService:
    """Make an engine with its own copy of the weights, in this process."""
    settings = asdict(config.engine_config()) | {"dtype": config.model.dtype, "device": str(ranks.device)}
    return RolloutService(Engine(folder, EngineConfig.from_dict(settings)))


def write_gathered(service: RolloutService, backend: TrainerBackend, config: JobConfig, version: str) -> int:
    """Update an engine that has a copy or a part of the weights, with the whole tensors that all ranks gather one after
    another. Returns the number of bytes that were written on this rank."""
    undo = cast(Undo, config.weights.undo)  # checked where it was read
    engine = service.engine
    pauses = engine.is_controller and not engine.is_paused
    if pauses:  # requests of coming steps wait
        engine.pause_generation("retract")
    service.begin_weight_update(weight_version=version, undo=undo)
    record = service.update_weights_from_named_tensors(backend.named_tensors())
    service.end_weight_update(in_flight=config.in_flight)
    service.release_weight_undo()
    if pauses:
        engine.continue_generation()
    return record.num_bytes
