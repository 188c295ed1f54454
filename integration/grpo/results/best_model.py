"""The model of the evaluation with the largest mean reward so far, in the folder `best` of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from ...failures import files_of
from .json_files import read_json
from .statistics import REWARD, of_evaluation

_DESCRIPTION = "evaluation.json"
_BEST_BY = "best_by"


class BestModel:
    """The folder of the best model: its file `evaluation.json` has the step, the evaluation and the model digest."""

    def __init__(self, run_folder: Path, best_by: str = "") -> None:
        """Name the folder inside that of a run; nothing is read yet. best_by: the name of the evaluation that decides;
        empty: the held-out one."""
        self.folder, self._best_by = run_folder / "best", best_by
        self.metric = of_evaluation(REWARD, best_by)  # what is compared

    def is_beaten_by(self, reward: float) -> bool:
        """Return whether a mean reward is larger than that of the best model. The first of equal ones stays, so that
        a resumed run keeps the same. Raises FileFailed."""
        path = self.folder / _DESCRIPTION
        if not path.exists():
            return True
        advice = f"move {self.folder} away, then start with --resume"
        return reward > read_json(path, {self.metric: (int, float)}, advice)[self.metric]

    def set_aside_after(self, step: int) -> Path | None:
        """Move the folder aside where its evaluation is of a later step: of a branch that a run gives up which goes on
        from `step`; and where another evaluation has decided. Returns where to; None: it stays. Raises FileFailed."""
        path = self.folder / _DESCRIPTION
        if not path.exists():
            return None
        advice = f"move {self.folder} away, then start with --resume"
        found = read_json(path, {"step": int}, advice)
        if found["step"] <= step and found.get(_BEST_BY, "") == self._best_by:
            return None
        aside = next(free for n in count(1) if not (free := self.folder.with_name(f"{self.folder.name}.{n}")).exists())
        with files_of(self.folder, "moved", advice):
            return self.folder.rename(aside)

    def described(self, step: int, found: Mapping[str, float], weight_digest: str | None) -> dict[str, str]:
        """Return the files that the folder holds beside the model, text by name. found: the evaluation."""
        by = {_BEST_BY: self._best_by} if self._best_by else {}
        description = {"step": step, **found, **by, "weight_digest": weight_digest}
        return {_DESCRIPTION: json.dumps(description) + "\n"}
