"""Axes, lines and bars on a drawing, and tables of BENCHMARKS.md as numbers to draw."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from svg import FAINT, INK, SOFT, Drawing

BENCHMARKS = Path(__file__).parents[2] / "BENCHMARKS.md"


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: its values, and their place on the page."""

    low: float
    high: float
    start: float  # coordinate of `low` on the page
    end: float  # coordinate of `high` on the page
    log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of a value."""
        scale: Callable[[float], float] = math.log10 if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Chart:
    """A pair of axes on a drawing."""

    drawing: Drawing
    x: Axis
    y: Axis

    def grid(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_name: str = "", y_name: str = "",
             x_label: Callable[[float], str] = "{:,.6g}".format, y_label: Callable[[float], str] = "{:,.6g}".format,
             ) -> None:  # fmt: skip
        """Draw thin lines at the ticks, their labels and the names of the axes."""
        for tick in y_ticks:
            y = self.y.at(tick)
            self.drawing.line([(self.x.start, y), (self.x.end, y)], FAINT, 0.8)
            self.drawing.text(self.x.start - 8, y, y_label(tick), 12, SOFT, "end")
        for tick in x_ticks:
            x = self.x.at(tick)
            self.drawing.line([(x, self.y.start), (x, self.y.start + 5)], SOFT, 1)
            self.drawing.text(x, self.y.start + 16, x_label(tick), 12, SOFT)
        self.drawing.line([(self.x.start, self.y.start), (self.x.end, self.y.start)], SOFT, 1.2)
        if x_name:
            self.drawing.text((self.x.start + self.x.end) / 2, self.y.start + 36, x_name, 13, SOFT)
        if y_name:
            self.drawing.text(self.x.start - 48, (self.y.start + self.y.end) / 2, y_name, 13, SOFT, turn=-90)

    def curve(self, points: Sequence[tuple[float, float]], colour: str, dash: str = "", dots: float = 0,
              width: float = 2) -> None:  # fmt: skip
        """Draw a line through the points; dots: radius of a dot at each."""
        on_page = [(self.x.at(x), self.y.at(y)) for x, y in points]
        self.drawing.line(on_page, colour, width, dash)
        for x, y in on_page if dots else ():
            self.drawing.dot(x, y, dots, colour)

    def legend(self, x: float, y: float, names: Sequence[tuple[str, str, str]]) -> None:
        """Draw the names of curves one below the other: words, colour, dashes."""
        for number, (words, colour, dash) in enumerate(names):
            self.drawing.line([(x, y + 20 * number), (x + 24, y + 20 * number)], colour, 2.2, dash)
            self.drawing.text(x + 32, y + 20 * number, words, 13, INK, "start")


def section(heading: str) -> str:
    """Return the text of the section of BENCHMARKS.md whose heading begins with these words."""
    parts = re.split(r"^## ", BENCHMARKS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [found] = [part for part in parts if part.startswith(heading)]
    return found


def machine_of(text: str) -> str:
    """Return the description of the machine that a section names by its letter, from the head of BENCHMARKS.md."""
    [letter] = set(re.findall(r"\b[Mm]achine ([A-Z])\b", text))
    [machine] = re.findall(rf"^\| {letter} \| ([^|]+) \|", BENCHMARKS.read_text(encoding="utf-8"), re.MULTILINE)
    return str(machine)


def table(text: str) -> list[dict[str, str]]:
    """Return the rows of the first table in a text, by the names of its columns."""
    [lines, *_] = re.findall(r"(?:^\|.*\|$\n)+", text, flags=re.MULTILINE)
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows]


def numbers(cell: str) -> list[float]:
    """Return the numbers in a cell: "4,642 (3,909-5,944)" as 4642, 3909, 5944."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]
