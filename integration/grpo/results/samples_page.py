"""The page of a run's samples: what it shows of a step, for a file or for a server of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....rollout.sequences.detokenizer import Tokenizer
from ...pages.rollouts import page_data
from .samples import FOLDER, TOKENIZER, read_samples, saved_steps


def tokenizer_folder(folder: Path) -> Path | None:
    """Return the folder in a run's folder that has the tokenizer of its model, or None."""
    places = (folder / FOLDER / TOKENIZER, folder / "model", folder / "best")
    return next((place for place in places if (place / "tokenizer_config.json").is_file()), None)


def samples_data(folder: Path, step: int | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return what the page shows of a step, by default of the newest. Raises ValueError if it has no samples."""
    steps = saved_steps(folder)
    if not steps:
        raise ValueError(f"{folder} has no samples: no step has been done, or `run.rollouts_every` is 0")
    chosen = steps[-1] if step is None else step
    rows = read_samples(folder, chosen)
    return page_data(rows, title=folder.name or str(folder), step=chosen, steps=steps, tokenizer=tokenizer)
