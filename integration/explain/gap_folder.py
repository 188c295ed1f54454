"""The folder that a run of the job writes at its first gap, read for a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..grpo.first_gap import read_gap
from .sequence import TokenSequence, sequence_of
from .ways import Way, parse_way


@dataclass(frozen=True)
class GapFolder:
    """The sample with the largest gap, its two ways, and their model."""

    sequence: TokenSequence
    ways: tuple[Way, Way]
    model: Path

    @classmethod
    def at(cls, folder: Path) -> GapFolder | None:
        """Read the folder; None: it is another one. Raises ValueError for one that holds something else."""
        found = read_gap(folder)
        if found is None:
            return None
        first, second = map(parse_way, found.ways)
        sequence = sequence_of(found.sequence, str(found.sequence.get("source") or folder))
        return cls(sequence, (first, second), found.model)
