"""A timeline of the loop's steps: without overlap, with overlap, and in two pipeline stages (rollout/loop/loop.py)."""

from __future__ import annotations

from svg import BLUE, GREEN, INK, ORANGE, PURPLE, SOFT, Drawing

LEFT, UNIT = 150, 62  # coordinate of time 0, and length of a unit of time
ROW = 44

Span = tuple[float, float, str, str]  # from, to, words, colour


def draw() -> Drawing:
    """Draw three panels with the same clock."""
    drawing = Drawing(940, 610, "Timeline of the loop's steps, without overlap, with overlap and in two stages")
    drawing.text(24, 30, "A step: schedule, run, commit, deliver", 18, INK, "start", bold=True)
    _panel(
        drawing, 66, "Without overlap",
        "the model waits while the loop plans and delivers",
        {
            "model": [(1, 3.6, "forward n", BLUE), (6.3, 8.9, "forward n+1", BLUE), (11.6, 12.4, "n+2", BLUE)],
            "this thread": [
                (0, 1, "plan n", ORANGE),
                (3.6, 4.4, "commit", GREEN), (4.4, 5.3, "deliver", PURPLE), (5.3, 6.3, "plan n+1", ORANGE),
                (8.9, 9.7, "commit", GREEN), (9.7, 10.6, "deliver", PURPLE), (10.6, 11.6, "plan n+2", ORANGE),
            ],
        },
    )  # fmt: skip
    _panel(
        drawing, 236, "With overlap",
        "while step n runs, step n+1 is planned and what step n-1 produced is delivered",
        {
            "model thread": [
                (1, 3.6, "forward n", BLUE), (4.5, 7.1, "forward n+1", BLUE), (8, 10.6, "forward n+2", BLUE),
                (11.5, 12.4, "n+3", BLUE),
            ],
            "this thread": [
                (0, 1, "plan n", ORANGE), (1, 2.1, "deliver n-1", PURPLE), (2.1, 3.2, "plan n+1", ORANGE),
                (3.6, 4.5, "commit n", GREEN), (4.5, 5.6, "deliver n", PURPLE), (5.6, 6.7, "plan n+2", ORANGE),
                (7.1, 8, "commit", GREEN), (8, 9.1, "deliver", PURPLE), (9.1, 10.2, "plan n+3", ORANGE),
                (10.6, 11.5, "commit", GREEN),
            ],
        },
    )  # fmt: skip
    _panel(
        drawing, 406, "Two pipeline stages",
        "as many steps run as there are stages; they commit in the order of their launches",
        {
            "first stage": [
                (0.6, 3, "n", BLUE), (3.6, 6, "n+1", BLUE), (7.2, 9.6, "n+2", BLUE), (10.8, 12.4, "n+3", BLUE),
            ],
            "last stage": [(3, 5.4, "n", BLUE), (6, 8.4, "n+1", BLUE), (9.6, 12, "n+2", BLUE)],
            "this thread": [
                (0, 0.6, "plan", ORANGE), (3, 3.6, "plan", ORANGE), (6, 6.6, "c, d n", GREEN),
                (6.6, 7.2, "plan", ORANGE), (9.6, 10.2, "c, d", GREEN), (10.2, 10.8, "plan", ORANGE),
            ],
        },
    )  # fmt: skip
    words = (
        "plan: choose what the next step runs.  commit: its tokens join their sequences.  deliver: text and answers."
    )
    drawing.text(24, 588, words + "  c, d: both.", 12.5, SOFT, "start")
    return drawing


def _panel(drawing: Drawing, top: float, name: str, says: str, rows: dict[str, list[Span]]) -> None:
    drawing.text(24, top, name, 15, INK, "start", bold=True)
    drawing.text(36 + 9.4 * len(name), top, says, 13, SOFT, "start")
    for number, (row, spans) in enumerate(rows.items()):
        y = top + 20 + number * ROW
        drawing.text(LEFT - 14, y + 17, row, 13, SOFT, "end")
        drawing.rect(LEFT, y, UNIT * 12.4, ROW - 10, "#f7f9fb", radius=3)
        for start, end, words, colour in spans:
            _span(drawing, LEFT + start * UNIT, y, (end - start) * UNIT, words, colour)
    y = top + 20 + len(rows) * ROW
    drawing.arrow([(LEFT, y), (LEFT + UNIT * 12.4, y)], SOFT, 1.2)
    drawing.text(LEFT - 14, y, "time", 12, SOFT, "end")


def _span(drawing: Drawing, x: float, y: float, width: float, words: str, colour: str) -> None:
    drawing.box(x + 0.8, y, width - 1.6, ROW - 10, "", colour)
    drawing.text(x + width / 2, y + (ROW - 10) / 2, words, 11)
