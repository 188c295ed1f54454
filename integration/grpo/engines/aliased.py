"""An engine that samples with the trainer's own module."""

from __future__ import annotations

from contextlib import AbstractContextManager

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ....rollout.engine import Engine
from ...service import RolloutService
from ..backends.backend import TrainerBackend
from ..settings.config import JobConfig
from .engine import LocalEngine


class AliasedEngine(LocalEngine):
    """An engine that samples with the trainer's own module. A sync copies only the bytes that are not aliased."""

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, backend: TrainerBackend
    ) -> None:
        self.service = RolloutService(Engine(model, config.engine_config(), tokenizer=tokenizer))
        self.hosted = self.service.engine.model
        self._backend, self._config = backend, config

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`."""
        tensors = self._backend.named_tensors()
        return self.service.commit_in_place(version, source=tensors, in_flight=self._config.in_flight).bytes_copied

    def announce_step(self) -> AbstractContextManager[None]:
        """See `JobEngine.announce_step`."""
        return self.service.optimizer_step()
