"""A picture of a weight update: begin, write, verify, commit, or undo (weight_sync/transaction/transaction.py)."""

from __future__ import annotations

from svg import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SOFT, Drawing

PHASES = (
    ("begin", ("names, shapes, dtypes", "and coverage are checked", "before one byte moves"), ORANGE),
    ("write", ("bytes arrive; what they", "overwrite is recorded", "first"), ORANGE),
    ("verify", ("SHA-256 of the resident", "bytes against the", "sender's"), ORANGE),
    ("commit", ("version and digest are", "published, a KV epoch", "starts"), GREEN),
)
WIDTH, HEIGHT, GAP = 190, 104, 32
LEFT, TOP = 34, 150


def draw() -> Drawing:
    """Draw the phases, the engine's work meanwhile, and the ways out."""
    drawing = Drawing(940, 500, "The life of a weight update: begin, write, verify, commit, or undo")
    drawing.text(24, 30, "Life of a weight update", 18, INK, "start", bold=True)
    end = LEFT + 4 * WIDTH + 3 * GAP
    held = LEFT + 3 * (WIDTH + GAP) + 60
    drawing.text(LEFT, 62, "what the engine does", 13, SOFT, "start")
    drawing.box(LEFT, 76, 70, 40, ("old",), BLUE, 13)
    drawing.box(LEFT + 74, 76, held - LEFT - 78, 40, ("no step runs; requests wait",), SOFT, 13)
    drawing.box(held, 76, end - held, 40, ("new weights",), GREEN, 13)
    for number, (name, says, colour) in enumerate(PHASES):
        x = LEFT + number * (WIDTH + GAP)
        drawing.box(x, TOP, WIDTH, HEIGHT, (name, *says), colour)
        if number:
            drawing.arrow([(x - GAP, TOP + HEIGHT / 2), (x - 2, TOP + HEIGHT / 2)])
    _ways_out(drawing, [LEFT + n * (WIDTH + GAP) + WIDTH / 2 for n in range(4)])
    return drawing


def _ways_out(drawing: Drawing, middles: list[float]) -> None:
    """Draw the results of a failure in the first three phases, and the ways to revert a commit."""
    bottom, bus, undone = TOP + HEIGHT, 296, 344
    for x in middles[:3]:
        drawing.line([(x, bottom), (x, bus)], RED)
    left, right = middles[0], middles[2]
    drawing.line([(left, bus), (right, bus)], RED)
    drawing.text(right + 14, bus - 16, "any failure, or a lease that ended", 13, RED, "start")
    drawing.arrow([(left + 60, bus), (left + 60, undone - 2)], RED)
    drawing.arrow([(right, bus), (right, undone - 2)], RED)
    drawing.text(left + 72, bus + 24, 'undo="tensors"', 12.5, SOFT, "start")
    drawing.text(right + 12, bus + 24, 'undo="none"', 12.5, SOFT, "start")
    drawing.box(LEFT, undone, 350, 96, ("rolled back", "every byte is what it was, the old version", "and digest "
                "stand, the error says why;", "the engine goes on with the old weights"), BLUE)  # fmt: skip
    drawing.box(right - 60, undone, 250, 96, ("poisoned", "nothing was kept: no step runs until", "a verified full "
                "update commits"), PURPLE)  # fmt: skip
    x = middles[3] + 62
    drawing.arrow([(x, bottom), (x, 466), (LEFT + 175, 466), (LEFT + 175, undone + 98)], SOFT, dash="5 4")
    drawing.text(590, 482, "revert, for as long as the overwritten bytes are kept", 12.5, SOFT)
