"""The weights that a run of the job saves: checkpoints, models, and the digests by which samples find them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...rollout.control.drafts import EngineDrafts
from ...rollout.errors import BrokenLogits
from ...rollout.receipt import guarantee
from ...weight_sync.disk.atomic_folder import num_bytes_beside
from ..ranks import Ranks
from .backends.backend import GatheredState, Gathering, TrainerBackend
from .engines.engine import JobEngine
from .results.best_model import BestModel
from .results.checkpoint import save_checkpoint
from .results.model_folder import write_model_folder
from .results.processor_files import copy_processor
from .results.settings_kept import settings_of
from .results.weights_kept import WeightsKept
from .settings.config import JobConfig

if TYPE_CHECKING:  # an extra
    from peft import PeftModel


class SavedWeights:
    """The weights of a run in its folder. Digests are noted on the first rank, of whole models only."""

    def __init__(
        self, config: JobConfig, ranks: Ranks, engine: JobEngine, backend: TrainerBackend,
        tokenizer: PreTrainedTokenizerBase, model_folder: Path, adapted: PeftModel | None,
    ) -> None:  # fmt: skip
        """Write nothing yet. model_folder: of the model at the start; adapted: the model around the module, if adapters
        are trained."""
        self._config, self._ranks, self._engine, self._backend = config, ranks, engine, backend
        self._tokenizer, self._model_folder, self._adapted = tokenizer, model_folder, adapted
        self._kept: WeightsKept | None = None  # of the first rank, while the job runs

    def describe_engines(self, first_step: int) -> None:
        """Write what the engines are, and the digest of the weights that the run begins with, on the first rank."""
        if not self._ranks.is_first:
            return
        self._kept = WeightsKept(self._config.folder, self._config.model.dtype)
        engine = self._engine
        self._kept.write_engine(self._config.engine_config(), guarantee(engine.hosted), self._model_folder)
        if self._adapted is None and not first_step:
            self._kept.add(self._model_folder, "0", engine.weight_digest())
        self.follow(first_step, engine.weight_digest())

    def follow(self, step: int, digest: str | None) -> None:
        """Note the version of the present weights, of this digest."""
        if self._kept is not None and self._adapted is None:
            self._kept.follow(str(step), digest)

    def save_checkpoint(self, step: int) -> None:
        """Write a checkpoint on the first rank, while the others wait. All ranks call it together."""
        state = self._backend.state()
        state = GatheredState(FiniteTensors(state.model), state.optimizer)
        with self._ranks.activity.of("writing a checkpoint"):
            try:
                if self._ranks.is_first:
                    self._write_checkpoint(step, state)
            except (OSError, BrokenLogits):  # the other ranks gather all the same
                self._finish(state)
                raise
            self._finish(state)

    def _finish(self, state: GatheredState) -> None:
        """Gather what is left of a state, with the other ranks, and wait for them."""
        state.model.finish()
        state.optimizer.finish()
        self._ranks.meet()

    def save_last(self, step: int) -> None:
        """Write the model of the last step. All ranks call it together."""
        folder = self._config.folder / "model"
        self.save_model(folder)
        self._keep_digest(folder, step, self._engine.weight_digest())

    def keep_if_best(self, step: int, found: Mapping[str, float]) -> None:
        """Save the model in the folder `best` if no evaluation before gave as large a mean reward. found: what the
        evaluations after this step returned, with the one of `checkpoints.best_by`. All ranks call it together."""
        if not self._config.checkpoints.best:
            return
        best = BestModel(self._config.folder, self._config.checkpoints.best_by)
        if self._ranks.largest(float(self._ranks.is_first and best.is_beaten_by(found[best.metric]))):
            digest = self._engine.weight_digest()
            self.save_model(best.folder, best.described(step, found, digest))
            self._keep_digest(best.folder, step, digest)

    def save_model(self, folder: Path, more: Mapping[str, str] | None = None) -> None:
        """Write the model and its tokenizer as a folder, or not at all, on the first rank, while the others wait. All
        ranks call it together. more: further files in it, text by name."""
        tensors: dict[str, Tensor] = {}

        def fill(empty: Path) -> None:
            if self._adapted is not None:
                self._adapted.save_pretrained(str(empty), save_embedding_layers=False)
            else:
                self._backend.save_pretrained(empty, tensors)
            self._tokenizer.save_pretrained(empty)
            copy_processor(self._model_folder, empty)
            for name, text in (more or {}).items():
                (empty / name).write_text(text, encoding="utf-8")

        with self._ranks.activity.of("writing the model", partial(num_bytes_beside, folder)):
            tensors = self._backend.on_first(self._backend.named_tensors())
            self._ranks.first_alone(lambda: write_model_folder(folder, fill, self._ranks.activity.note))

    def drafts(self) -> EngineDrafts | None:
        """Return the drafts of the first rank's engine, if it is in this process: a checkpoint has them too."""
        service = self._engine.service
        return service.engine.drafts if self._ranks.is_first and service is not None else None

    def _write_checkpoint(self, step: int, state: GatheredState) -> None:
        folder, digest = self._config.folder / "checkpoints", self._engine.weight_digest()
        settings, num_kept = settings_of(self._config), self._config.checkpoints.keep
        note = self._ranks.activity.note
        path = save_checkpoint(folder, step, state, digest, self.drafts(), num_kept, settings, note)
        self._keep_digest(path, step, digest)

    def _keep_digest(self, path: Path, step: int, digest: str | None) -> None:
        """Note the digest of weights that were saved in a folder, unless they are adapters alone."""
        if self._kept is not None and self._adapted is None:
            self._kept.add(path, str(step), digest)


class FiniteTensors(Gathering):
    """Gathered tensors of which none may have a number that is not finite."""

    def __init__(self, tensors: Gathering) -> None:
        super().__init__(tensors.names, tensors.make, tensors.ranks)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Begin to gather. Raises BrokenLogits, naming the tensors, at the end."""
        broken = []
        for name, tensor in super().__iter__():
            if not tensor.isfinite().all():
                broken.append(name)
            yield name, tensor
        if broken:
            raise BrokenLogits(f"trained weights are not finite: {', '.join(broken[:5])}")
