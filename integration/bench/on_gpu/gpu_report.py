"""A report that is on disk after every figure, so that a run that is cut off loses none."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Report:
    """The figures of a benchmark by the part that found them."""

    def __init__(self, out: Path | None, budget_s: float) -> None:
        """Start the clock of the budget. out: the file to write after every figure; None: none."""
        self.figures: dict[str, Any] = {}
        self._out, self._budget_s, self._began = out, budget_s, time.monotonic()

    @property
    def is_over(self) -> bool:
        """Return whether the budget is spent."""
        return time.monotonic() - self._began > self._budget_s

    def set(self, **values: object) -> None:
        """Add single values."""
        self.figures.update(values)
        self._write(values)

    def add(self, part: str, figure: dict[str, Any]) -> None:
        """Add one more figure to a part's list."""
        self.figures.setdefault(part, []).append(figure)
        self._write({part: figure})

    def _write(self, new: dict[str, Any]) -> None:
        print(json.dumps(new), file=sys.stderr, flush=True)
        if self._out is not None:
            beside = self._out.with_name(f"{self._out.name}.part")
            beside.write_text(json.dumps(self.figures, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, self._out)
