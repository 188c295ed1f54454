"""A picture of a real model that learns: rewards of configs/smollm2_sentences.toml, held-out and of the samples, with a
control whose rewards are shuffled, from real_run.csv.

`python docs/pictures/real_run.py RUN_FOLDER CONTROL_FOLDER` writes the CSV anew from the two runs' folders.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from chart import Axis, Chart
from svg import BLUE, ORANGE, SOFT, Drawing

FIGURES = Path(__file__).with_name("real_run.csv")
RUNS = ("run", "control")
COLUMNS = ("reward_mean", "eval_reward_mean")


def draw() -> Drawing:
    """Draw both runs' rewards over the steps."""
    with open(FIGURES, encoding="utf-8", newline="") as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    drawing = Drawing(820, 400, "Held-out mean reward over the steps, with a control of shuffled rewards")
    drawing.text(24, 30, "A 135 M-parameter model learns to keep to a number of words", 18, anchor="start", bold=True)
    last = max(row["step"] for row in rows)
    x = Axis(0, last, 84, 780)
    chart = Chart(drawing, x, Axis(0, 1, 330, 66))
    chart.grid(range(0, int(last) + 1, 5), [0, 0.25, 0.5, 0.75, 1], "step", y_label="{:.0%}".format)
    for run, colour in zip(RUNS, (BLUE, SOFT), strict=True):
        curve = {
            name: [(row["step"], row[f"{run}/{name}"]) for row in rows if f"{run}/{name}" in row] for name in COLUMNS
        }
        chart.curve(curve["reward_mean"], ORANGE if run == "run" else SOFT, width=1.2)
        chart.curve(curve["eval_reward_mean"], colour, dots=4, width=2.2)
        beside = -13 if run == "run" else 14  # the control's numbers stand below its curve
        for step, value in curve["eval_reward_mean"]:
            place = x.at(step) + (22 if step == 0 else -4)
            drawing.text(place, chart.y.at(value) + beside, f"{value:.1%}", 13, colour, bold=True)
    chart.legend(
        96, 84, [("held-out mean reward", BLUE, ""), ("mean reward of the samples", ORANGE, ""),
                 ("the control: shuffled rewards", SOFT, "")],
    )  # fmt: skip
    return drawing


def write_figures(*folders: Path) -> None:
    """Write the CSV from the folders of the run and of its control."""
    found: dict[int, dict[str, object]] = {}
    for run, folder in zip(RUNS, folders, strict=True):
        before = json.loads((folder / "before.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        for line in [{"step": 0, **before}, *map(json.loads, lines)]:
            row = found.setdefault(line["step"], {"step": line["step"]})
            row |= {f"{run}/{name}": line[name] for name in COLUMNS if name in line}
    with open(FIGURES, "w", encoding="utf-8", newline="") as file:
        names = ["step", *(f"{run}/{name}" for run in RUNS for name in COLUMNS)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found.values())


if __name__ == "__main__":
    write_figures(*map(Path, sys.argv[1:]))
