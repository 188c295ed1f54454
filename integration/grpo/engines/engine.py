"""The engine of one rank of the main job: what the job asks of it, and the parts that several kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel

from ....rollout.completion import Completion
from ....rollout.config import EngineConfig
from ....rollout.engine import Engine
from ....rollout.model.hosted_model import HostedModel
from ....rollout.ranks.channel import RankChannel
from ....rollout.sampling_params import SamplingParams
from ...push.adapters.named_tensors import outgoing_specs, unwrapped
from ...ranks import Ranks
from ...service import RolloutService
from ..backends.backend import TrainerBackend
from ..config import JobConfig


class JobEngine(ABC):
    """What the job asks of its engine. Every rank calls `sync` together."""

    hosted: HostedModel  # the trainer's module with the engine's numerics
    service: RolloutService | None = None  # of the engine in this process; None: it is in one of its own
    ranks: RankChannel | None = None  # among the ranks of an engine of several

    @abstractmethod
    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams] | SamplingParams) -> list[Completion]:
        """Complete every prompt with the weights that were synced last."""

    @abstractmethod
    def sync(self, version: str) -> int:
        """Bring the trainer's weights into the engine as `version`; returns the bytes that this rank moved."""

    @abstractmethod
    def weight_digest(self) -> str | None:
        """The model digest of what the engine holds."""

    def announce_step(self) -> AbstractContextManager[None]:
        """The optimizer's step runs in here."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """End what this engine started."""


class LocalEngine(JobEngine):
    """Base of the engines that are in this process."""

    service: RolloutService  # type: ignore[assignment]

    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams] | SamplingParams) -> list[Completion]:
        """See `JobEngine.generate`."""
        with self.service.rollout(release_kv=True):
            return self.service.engine.generate(prompts, params)

    def weight_digest(self) -> str | None:
        """See `JobEngine.weight_digest`."""
        return self.service.engine.weight_digest

    def close(self) -> None:
        """See `JobEngine.close`."""
        self.service.close()


class OtherModelEngine(JobEngine):
    """Base of the engines with weights of their own. The trainer's module is hosted for its numerics alone."""

    def __init__(self, config: JobConfig, model: PreTrainedModel, backend: TrainerBackend) -> None:
        self.hosted = HostedModel.adopt(
            model, dtype=None, device=None, invariant=config.engine.invariant, k_blocks=config.engine.k_blocks
        )
        self._specs = outgoing_specs(unwrapped(model))  # before it is sharded
        self._backend = backend
        self._config = config


def copied_service(config: JobConfig, folder: Path, ranks: Ranks) -> RolloutService:
    """An engine with weights of its own, in this process."""
    settings = asdict(config.engine_config()) | {"dtype": config.model.dtype, "device": str(ranks.device)}
    return RolloutService(Engine(folder, EngineConfig.from_dict(settings)))


def write_gathered(service: RolloutService, backend: TrainerBackend, config: JobConfig, version: str) -> int:
    """Update an engine that has a copy, or a part, with the whole tensors that all ranks gather one after another;
    returns the bytes that were written here."""
    service.begin_weight_update(weight_version=version, undo=config.weights.undo)  # type: ignore[arg-type]
    record = service.update_weights_from_named_tensors(backend.named_tensors())
    service.end_weight_update()
    service.release_weight_undo()
    return record.num_bytes
