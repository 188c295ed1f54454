"""A checkpoint of the job as the folder of a model: its weights, with the configuration and tokenizer of its run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..grpo.results.weights_kept import RUN_ENGINE, read_run_engine

_WEIGHTS, _STATE = "model.safetensors", "state.json"  # of a checkpoint
_OF_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".index.json",
)  # ends of names, of the model that the run began with


@contextmanager
def model_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that a model can be loaded from: the path itself, but for a checkpoint of the job.

    For a checkpoint it is a temporary one, with links to its weights and to the other files of the run's model: the one
    that it saved, or else the one that it began with. Raises ValueError naming a file of the run that cannot be read.
    """
    base = _model_of_run(path) if _is_bare_checkpoint(path) else None
    if base is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-explain-") as name:
        folder = Path(name)
        (folder / _WEIGHTS).symlink_to((path / _WEIGHTS).resolve())
        for file in base.iterdir():
            if file.is_file() and not file.name.endswith(_OF_WEIGHTS):
                (folder / file.name).symlink_to(file.resolve())
        yield folder


def _is_bare_checkpoint(path: Path) -> bool:
    return all((path / name).is_file() for name in (_WEIGHTS, _STATE)) and not (path / "config.json").is_file()


def _model_of_run(checkpoint: Path) -> Path | None:
    """Return the folder of a model of the run that has a checkpoint; None where there is none."""
    run = checkpoint.resolve().parent.parent
    known = [run / "model"]
    if (run / RUN_ENGINE).is_file():
        known.append(Path(str(read_run_engine(run).get("model"))))
    return next((folder for folder in known if (folder / "config.json").is_file()), None)
