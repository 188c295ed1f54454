"""The first gap of a run of the job, written down: the sample, the weights and the ways, for `lockstep explain`.

The folder `gap` of a run has the sample with the largest gap, with the log-probabilities that the engine reported, and
the two ways in which it was run (`gap.json`); and the weights of both, before the optimizer's step (`model/`). It is
whole once it has `gap.json`, which is written last: without it, it is written again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..failures import FileFailed, files_of
from ..ranks import Ranks
from .results.json_files import write_json
from .settings.config import JobConfig
from .training.packing import Sample
from .training.trainer import SampleGap

logger = logging.getLogger(__name__)

NAME, MODEL = "gap", "model"
_FILE = "gap.json"


@dataclass(frozen=True)
class WrittenGap:
    """The content of such a folder."""

    sequence: dict[str, Any]  # prompt_ids, token_ids, logprobs, temperature, source
    ways: tuple[str, str]  # as `lockstep explain` reads them
    model: Path


def read_gap(folder: Path) -> WrittenGap | None:
    """Read the folder; None: it is another one. Raises ValueError naming a file that holds something else."""
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        first, second = found["ways"]
        return WrittenGap(found["sequence"], (first, second), folder / MODEL)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class FirstGap:
    """A hook of the trainer that writes the folder, once in a run."""

    def __init__(self, config: JobConfig, ranks: Ranks, save_model: Callable[[Path], None]) -> None:
        """Prepare for the first gap. save_model: writes the trainer's weights as a folder; all ranks call it."""
        self._config, self._ranks, self._save_model = config, ranks, save_model
        self._is_done = False

    def __call__(self, step: int, gap: float, own: SampleGap | None) -> None:
        """Write the folder and print the command, unless this run has a whole one. All ranks call it before the
        optimizer's step. A folder that cannot be written is reported, and the run goes on."""
        if self._is_done:
            return
        self._is_done = True
        folder = self._config.folder / NAME
        if self._ranks.largest(float(self._ranks.is_first and (folder / _FILE).exists())):
            return
        found = [one for one in self._ranks.in_turn([own]) if one is not None]
        try:
            # A model with adapters is saved as its adapters, which no engine of `explain` can put into its base.
            if not self._config.train.lora.rank:
                self._save_model(folder / MODEL)
            if self._ranks.is_first:
                self._write(folder, step, gap, max(found, key=lambda one: one.gap))
        except FileFailed as error:
            logger.error("the gap of step %d is not written down, the run goes on: %s", step + 1, error)

    def _write(self, folder: Path, step: int, gap: float, worst: SampleGap) -> None:
        sequence = _sequence(worst.sample, self._config.rollout.temperature, f"step {step + 1}, a gap of {gap}")
        with files_of(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _FILE, {"sequence": sequence, "ways": self._ways()})
        model = " --model FOLDER, with the adapters merged" if self._config.train.lora.rank else ""
        advice = f"To see where they part: lockstep explain {folder}{model}"
        if worst.sample.images is not None:
            advice = f"The sample, in {folder}, has images, which lockstep explain does not take"
        with suppress(OSError):  # a log that cannot be written does not end a run
            tqdm.write(
                f"step {step + 1}: the engine's and the trainer's log-probabilities differ by up to {gap}. {advice}"
            )

    def _ways(self) -> list[str]:
        engine, layout = self._config.engine, self._config.parallel
        common = [f"dtype={self._config.model.dtype}"]
        common += [f"k_blocks={engine.k_blocks}"] if engine.k_blocks > 1 else []
        common += [] if engine.invariant else ["no-invariant"]
        sizes = [f"{name}={size}" for name, size in (("tp", layout.tp), ("pp", layout.pp)) if size > 1]
        return [",".join(["decode", *sizes, *common]), ",".join(["trainer", *common])]


def _sequence(sample: Sample, temperature: float, source: str) -> dict[str, object]:
    """Return a sample for the file, without log-probabilities if it has tokens of an environment, which have none."""
    return {
        "prompt_ids": list(sample.prompt_ids),
        "token_ids": list(sample.token_ids),
        "logprobs": list(sample.logprobs) if sample.sampled is None else [],
        "temperature": temperature,
        "source": source,
        **({} if sample.images is None else {"images": sample.images.digest}),
    }
