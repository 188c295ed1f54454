"""The model of the evaluation with the largest mean reward so far, in the folder `best` of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from ...failures import files_of
from .json_files import read_json
from .statistics import REWARD

_DESCRIPTION = "evaluation.json"


class BestModel:
    """The folder of the best model: its file `evaluation.json` has the step, the evaluation and the model digest."""

    def __init__(self, run_folder: Path) -> None:
        """Name the folder inside that of a run; nothing is read yet."""
        self.folder = run_folder / "best"

    def is_beaten_by(self, reward: float) -> bool:
        """Return whether a mean reward is larger than that of the best model. The first of equal ones stays, so that
        a resumed run keeps the same. Raises FileFailed."""
        path = self.folder / _DESCRIPTION
        if not path.exists():
            return True
        advice = f"move {self.folder} away, then start with --resume"
        return reward > read_json(path, {REWARD: (int, float)}, advice)[REWARD]

    def set_aside_after(self, step: int) -> Path | None:
        """Move the folder aside where its evaluation is of a later step: of a branch that a run gives up which goes on
        from `step`. Returns where to; None: it stays. Raises FileFailed."""
        path = self.folder / _DESCRIPTION
        if not path.exists():
            return None
        advice = f"move {self.folder} away, then start with --resume"
        if read_json(path, {"step": int}, advice)["step"] <= step:
            return None
        aside = next(free for n in count(1) if not (free := self.folder.with_name(f"{self.folder.name}.{n}")).exists())
        with files_of(self.folder, "moved", advice):
            return self.folder.rename(aside)

    def described(self, step: int, found: Mapping[str, float], weight_digest: str | None) -> dict[str, str]:
        """Return the files that the folder holds beside the model, text by name. found: the evaluation."""
        description = {"step": step, **found, "weight_digest": weight_digest}
        return {_DESCRIPTION: json.dumps(description) + "\n"}
