"""Draw every picture of the documentation: `python docs/pictures/draw.py [FOLDER]`, by default docs/images.

The same code, table or figures give the same bytes. Pictures of the code are drawn from the code, and pictures of
measurements from figures in the repository (BENCHMARKS.md, training_curve.csv).
"""

from __future__ import annotations

import sys
from pathlib import Path

import blocks
import decode_steps
import peers
import real_run
import rooms
import shared_weights
import states
import step
import training_curve
import update

PICTURES = (blocks, decode_steps, peers, real_run, rooms, shared_weights, states, step, training_curve, update)
IMAGES = Path(__file__).parents[1] / "images"


def main(folder: Path) -> None:
    """Write NAME.svg for each picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        (folder / f"{picture.__name__}.svg").write_text(picture.draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
