"""A picture of the 80 steps of `make train`: accuracy, reward and the engine-trainer gap, from training_curve.csv.

`python docs/pictures/training_curve.py RUN_FOLDER` writes the CSV anew from a run's metrics.jsonl and before.json.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from chart import Axis, Chart
from svg import BLUE, GREEN, INK, ORANGE, SOFT, Drawing

FIGURES = Path(__file__).with_name("training_curve.csv")
COLUMNS = ("step", "reward_mean", "eval_reward_mean", "logprob_gap")


def draw() -> Drawing:
    """Draw reward and held-out mean reward over the steps, and below them the gap, which lies on the axis at 0."""
    with open(FIGURES, encoding="utf-8", newline="") as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    series = {name: [(row["step"], row[name]) for row in rows if name in row] for name in COLUMNS[1:]}
    drawing = Drawing(820, 520, "Reward, held-out mean reward and logprob_gap over the steps of make train")
    drawing.text(24, 30, "make train: three-digit sums with GRPO, two CPU ranks", 18, INK, "start", bold=True)
    last = max(row["step"] for row in rows)
    x = Axis(0, last, 84, 780)
    upper = Chart(drawing, x, Axis(0, 1, 330, 66))
    upper.grid(range(0, int(last) + 1, 10), [0, 0.25, 0.5, 0.75, 1], y_label="{:.0%}".format)
    upper.curve(series["reward_mean"], ORANGE, width=1.6)
    upper.curve(series["eval_reward_mean"], BLUE, dots=4, width=2.2)
    (first, before), (_, after) = series["eval_reward_mean"][0], series["eval_reward_mean"][-1]
    drawing.text(x.at(first) + 12, upper.y.at(before) + 4, f"{before:.1%}", 13, BLUE, "start", bold=True)
    drawing.text(x.at(last), upper.y.at(after) - 13, f"{after:.1%}", 13, BLUE, bold=True)
    upper.legend(520, 258, [("held-out mean reward", BLUE, ""), ("mean reward of the samples", ORANGE, "")])
    _gap(drawing, x, series["logprob_gap"])
    return drawing


def _gap(drawing: Drawing, x: Axis, gaps: list[tuple[float, float]]) -> None:
    worst = max(gap for _, gap in gaps)
    highest = max(worst, 1e-6)
    lower = Chart(drawing, x, Axis(0, highest, 460, 392))
    lower.grid(
        range(0, int(x.high) + 1, 10), [0, highest], "step", y_label=lambda value: f"{value:.0e}" if value else "0.0"
    )
    lower.curve(gaps, GREEN, dots=2.2)
    drawing.text(x.start, 374, "logprob_gap", 14, INK, "start", bold=True)
    says = f"largest |engine - trainer| log-probability over all tokens of a step; its largest value: {worst!r}"
    drawing.text(x.start + 108, 374, says, 12.5, SOFT, "start")


def write_figures(run: Path) -> None:
    """Write the CSV from a run's folder."""
    before = json.loads((run / "before.json").read_text(encoding="utf-8"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{"step": 0, **before}, *map(json.loads, lines)]
    with open(FIGURES, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    write_figures(Path(sys.argv[1]))
