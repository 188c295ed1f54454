"""A picture of the tokens a second of lockstep, vLLM and transformers, from the table in BENCHMARKS.md."""

from __future__ import annotations

from chart import Axis, Chart, machine_of, numbers, section, table
from svg import BLUE, INK, ORANGE, PURPLE, SOFT, TINTS, Drawing

HEADING = "Rollout, against vLLM and transformers"
LOADS = {  # a row of the table by its load: its name in the picture
    "`tiny`": "tiny, 32 prompts",
    "`small`": "small, 32 prompts",
    "`small`, `--group 8 --prompt-tokens 512`": "small, groups of 8",
}
ENGINES = {"ours": ("lockstep", BLUE), "vLLM": ("vLLM", ORANGE), "transformers": ("transformers", PURPLE)}
PANEL, LEFT, TOP, BOTTOM = 270, 72, 118, 350


def draw() -> Drawing:
    """Draw a panel for each load: a bar is the median, its whisker the range over the repeats."""
    text = section(HEADING)
    machine = machine_of(text)
    rows = {row["load"]: row for row in table(text)}
    drawing = Drawing(LEFT + len(LOADS) * PANEL + 20, 450, "Tokens a second of lockstep, vLLM and transformers")
    drawing.text(24, 30, "Tokens a second, sampled with log-probabilities", 18, INK, "start", bold=True)
    drawing.text(24, 56, f"On {machine}, bfloat16, by turns in one run", 13, SOFT, "start")
    for number, (load, name) in enumerate(LOADS.items()):
        _panel(drawing, LEFT + number * PANEL, name, rows[load])
    drawing.text(24, 414, "A bar is the median of the repeats, its whisker their range. Each load has its own scale.",
                 12.5, SOFT, "start")  # fmt: skip
    drawing.text(24, 432, "lockstep runs in invariant mode. Command, figures and their noise: BENCHMARKS.md.",
                 12.5, SOFT, "start")  # fmt: skip
    return drawing


def _panel(drawing: Drawing, left: float, name: str, row: dict[str, str]) -> None:
    values = {engine: numbers(row[engine]) for engine in ENGINES if numbers(row[engine])}
    step = _tick(max(max(measured) for measured in values.values()))
    ticks = [step * n for n in range(5)]
    x, y = Axis(0, len(ENGINES), left, left + PANEL - 64), Axis(0, ticks[-1], BOTTOM, TOP)
    Chart(drawing, x, y).grid((), ticks)
    middle = (x.start + x.end) / 2
    drawing.text(middle, TOP - 34, name, 14, INK, bold=True)
    drawing.text(middle, TOP - 15, f"{numbers(row['ours / vLLM'])[0]:.2f} x vLLM", 13, SOFT)
    for number, (engine, measured) in enumerate(values.items()):
        label, colour = ENGINES[engine]
        median, low, high = measured
        middle = x.at(number + 0.5 + (len(ENGINES) - len(values)) / 2)
        drawing.rect(middle - 21, y.at(median), 42, BOTTOM - y.at(median), TINTS[colour], colour, 2)
        drawing.line([(middle, y.at(low)), (middle, y.at(high))], colour, 1.6)
        for end in (low, high):
            drawing.line([(middle - 6, y.at(end)), (middle + 6, y.at(end))], colour, 1.6)
        drawing.text(middle, y.at(high) - 11, f"{median:,.0f}", 12, INK, bold=True)
        drawing.text(middle, BOTTOM + 18, label, 12, INK)


def _tick(highest: float) -> float:
    """Return a quarter of the axis: the smallest round number that leaves room above the highest bar."""
    round_numbers = (n * 10**power for power in range(9) for n in (1, 1.5, 2, 2.5, 4, 5, 7.5))
    return next(number for number in round_numbers if 3.6 * number > highest)
