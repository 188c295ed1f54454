"""An engine with a copy of the weights that all ranks gather."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from ...ranks import Ranks
from ..backends.backend import TrainerBackend
from ..settings.config import JobConfig
from .engine import LocalEngine, OtherModelEngine, copied_service, write_gathered


class GatheredEngine(OtherModelEngine, LocalEngine):
    """An engine with its own copy of the weights in each rank. A sync gathers whole tensors on all ranks, and each rank
    writes them into its copy."""

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, folder: Path, ranks: Ranks, backend: TrainerBackend
    ) -> None:
        super().__init__(config, model, backend)
        self.service = copied_service(config, folder, ranks)

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`."""
        return write_gathered(self.service, self._backend, self._config, version)
