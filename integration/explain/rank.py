"""One rank of a replica that runs a sequence: `torchrun -m lockstep.integration.explain.rank FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..launcher import end_with_launcher
from ..ranks import process_group, this_rank
from .engine_runs import run_engine
from .sequence import read_sequence
from .ways import Way


def main(folder: Path) -> None:
    """Run this rank's part and write its recording into the folder."""
    end_with_launcher()
    job = json.loads((folder / "job.json").read_text())
    ranks = this_rank()
    with process_group(ranks, timeout_s=300):
        recording = run_engine(Path(job["model"]), Way(**job["way"]), read_sequence(folder / "sequence.json"))
        recording.save(folder / f"rank{ranks.rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
