"""A picture of the time of a decode step by batch and context, and its floor, from the table in BENCHMARKS.md."""

from __future__ import annotations

import re

from chart import Axis, Chart, numbers, section, table
from svg import BLUE, GREEN, INK, ORANGE, PURPLE, SOFT, Drawing

HEADING = "Decode steps"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
TICKS = (10, 20, 50, 100, 200, 500)


def draw() -> Drawing:
    """Draw a line for each context, and its floor dashed, with both axes logarithmic."""
    text = section(HEADING)
    rows = table(text)
    floor = " ".join(re.findall(r"its floor: (.*?), both", " ".join(text.split()))[0].split())
    drawing = Drawing(820, 500, "Time of a decode step by batch and context, and its floor")
    drawing.text(24, 30, "Time of a decode step", 18, INK, "start", bold=True)
    drawing.text(24, 54, "`lockstep bench decode`, `small`, bfloat16, invariant mode, two threads".replace("`", ""), 13,
                 SOFT, "start")  # fmt: skip
    batches = [int(row["batch"]) for row in rows]
    chart = Chart(drawing, Axis(batches[0], batches[-1], 84, 620, log=True), Axis(8, 500, 420, 84, log=True))
    chart.grid(batches, TICKS, "sequences in a batch", "ms a step")
    names = [(name, int(numbers(name)[0])) for name in rows[0] if name != "batch"]
    for (name, _), colour in zip(names, COLOURS, strict=True):
        cells = [(int(row["batch"]), numbers(row[name])) for row in rows if row[name]]
        chart.curve([(batch, floor_ms) for batch, (_, floor_ms) in cells], colour, "5 4", width=1.4)
        chart.curve([(batch, step_ms) for batch, (step_ms, _) in cells], colour, dots=3.5)
    legend = [(f"{context:,} tokens", colour, "") for (_, context), colour in zip(names, COLOURS, strict=True)]
    drawing.text(650, 100, "context", 13, SOFT, "start")
    chart.legend(650, 122, [*legend, ("its floor", SOFT, "5 4")])
    drawing.text(24, 482, f"Floor: {floor}.", 12.5, SOFT, "start")
    return drawing
