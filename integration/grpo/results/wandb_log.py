"""The metrics of a run in Weights & Biases."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...failures import files_of

logger = logging.getLogger(__name__)

_ID = "wandb_id.txt"


class WandbLog:
    """The run of a project in Weights & Biases to which a job's metrics go. One rank has it.

    It is a view of the metrics: where it fails once the run has begun, that is reported once, and the run goes on.
    """

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """Begin the run, or go on with the one of this folder. settings: of the job, shown beside the metrics.

        The variables of wandb hold, such as WANDB_MODE=offline. Raises ValueError where it refuses the run, and
        FileFailed.
        """
        import wandb  # of the extra `wandb`, and slow to import

        self._errors: tuple[type[Exception], ...] = (wandb.Error, OSError)
        path = folder / _ID
        with files_of(path):
            if not path.exists():
                path.write_text(secrets.token_hex(8) + "\n", encoding="ascii")
            run_id = path.read_text(encoding="ascii").strip()
        try:
            self._run: Any = wandb.init(
                project=project, name=folder.name, id=run_id, resume="allow", dir=str(folder), config=dict(settings)
            )
        except wandb.Error as error:
            raise ValueError(f"run.wandb: {error}; WANDB_MODE=offline keeps the metrics in {folder}") from error

    def step(self, line: Mapping[str, object]) -> None:
        """Send the numbers of one step's metrics."""
        if self._run is None:
            return
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
        try:
            self._run.log(numbers, step=line["step"])
        except self._errors as error:
            self._drop(error)

    def close(self, exit_code: int = 0) -> None:
        """End the run, and wait until its metrics are sent. exit_code: 0, unless the job has failed."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=exit_code)
        except self._errors as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        self._run = None
        logger.error("the run in Weights & Biases ends here, the job goes on: %s", error)
