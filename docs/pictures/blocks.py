"""A picture of the owners of KV blocks: free, cached, pinned, held (rollout/kv/ledger.py)."""

from __future__ import annotations

from svg import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SOFT, Drawing

CELL = 46
KINDS = {"free": SOFT, "cached": BLUE, "pinned": PURPLE, "held": GREEN}


def draw() -> Drawing:
    """Draw the moves of a block between owners, and the block tables of two requests that share a prefix."""
    drawing = Drawing(940, 590, "Who owns which KV block: free, held, cached, pinned")
    drawing.text(24, 30, "Who owns which KV block", 18, INK, "start", bold=True)
    _owners(drawing)
    _tables(drawing)
    return drawing


def _owners(drawing: Drawing) -> None:
    drawing.box(40, 120, 170, 66, ("free", "owned by none"), KINDS["free"])
    drawing.box(385, 120, 170, 66, ("held", "by running sequences"), KINDS["held"])
    drawing.box(730, 120, 170, 66, ("cached", "eviction may take it"), KINDS["cached"])
    drawing.box(730, 258, 170, 66, ("pinned", "cached, protected"), KINDS["pinned"])
    drawing.arrow([(210, 138), (383, 138)])
    drawing.text(297, 126, "allocated", 13, SOFT)
    drawing.arrow([(385, 168), (212, 168)])
    drawing.text(297, 184, "ends, not published", 13, SOFT)
    drawing.arrow([(555, 138), (728, 138)])
    drawing.text(642, 126, "published, last one ends", 12.5, SOFT)
    drawing.arrow([(730, 168), (557, 168)])
    drawing.text(642, 184, "a prefix matches", 13, SOFT)
    drawing.arrow([(815, 120), (815, 76), (125, 76), (125, 118)], RED)
    drawing.text(470, 64, "evicted (least recently used first), flushed, or a weight commit began a new epoch", 13, RED)
    drawing.arrow([(800, 186), (800, 256)])
    drawing.text(790, 222, "pinned", 13, SOFT, "end")
    drawing.arrow([(832, 258), (832, 188)])
    drawing.lines(842, 206, ("unpinned,", "expired,", "dropped"), 12.5, SOFT, "start")
    drawing.arrow([(730, 291), (520, 291), (520, 188)])
    drawing.text(620, 279, "a prefix matches", 13, SOFT)
    drawing.text(40, 262, "free + held + cached + pinned = pool,", 14, INK, "start", bold=True)
    drawing.text(40, 284, "checked whenever nothing runs: then none is held", 13, SOFT, "start")


def _tables(drawing: Drawing) -> None:
    top = 400
    drawing.line([(24, 352), (916, 352)], "#cbd2d9", 1)
    drawing.text(24, 374, "Block tables of two requests with a common prefix", 15, INK, "start", bold=True)
    tables = {
        "request A": (("n1", "held"), ("n2", "held"), ("n3", "held"), ("7", "own"), ("9", "own"), ("4", "part")),
        "request B": (("n1", "held"), ("n2", "held"), ("n5", "held"), ("2", "own"), ("6", "part")),
    }
    for number, (name, blocks) in enumerate(tables.items()):
        y = top + number * (CELL + 34)
        drawing.text(40, y + CELL / 2, name, 14, INK, "start")
        for column, (label, kind) in enumerate(blocks):
            _block(drawing, 150 + column * (CELL + 4), y, label, kind)
    held_end, row_end = 150 + 3 * (CELL + 4) - 4, 150 + 6 * (CELL + 4) - 4
    _brace(drawing, 150, held_end, top + CELL + 8, "published: nodes of the tree")
    _brace(drawing, held_end + 4, row_end, top + CELL + 8, "")
    drawing.text((held_end + 4 + row_end) / 2, top + CELL + 22, "private", 12, SOFT)
    _tree(drawing, top)
    drawing.text(40, 566, "A private block is published once all its tokens are computed. n2's KV is computed once, "
                 "for both.", 13, SOFT, "start")  # fmt: skip


def _tree(drawing: Drawing, top: float) -> None:
    drawing.text(540, top - 6, "the tree", 13, SOFT, "start")
    spots = {"n1": (560, top + 40), "n2": (650, top + 40), "n3": (740, top), "n5": (740, top + 80), "n4": (830, top)}
    kinds = {"n1": "held", "n2": "held", "n3": "held", "n5": "held", "n4": "cached"}
    for start, end in (("n1", "n2"), ("n2", "n3"), ("n2", "n5"), ("n3", "n4")):
        (ax, ay), (bx, by) = spots[start], spots[end]
        drawing.arrow([(ax + CELL, ay + CELL / 2), (bx - 2, by + CELL / 2)])
    for name, (x, y) in spots.items():
        _block(drawing, x, y, name, kinds[name])
    drawing.text(853, top + CELL + 14, "held by none", 12, SOFT)


def _block(drawing: Drawing, x: float, y: float, label: str, kind: str) -> None:
    if kind == "part":
        drawing.rect(x, y, CELL, CELL, "#ffffff", ORANGE, dash="5 3")
        drawing.rect(x + 1, y + 1, CELL * 0.4, CELL - 2, "#fdeedb", radius=5)
    else:
        drawing.box(x, y, CELL, CELL, "", ORANGE if kind == "own" else KINDS[kind])
    drawing.text(x + CELL / 2, y + CELL / 2, label, 14)


def _brace(drawing: Drawing, left: float, right: float, y: float, words: str) -> None:
    drawing.line([(left, y - 4), (left, y), (right, y), (right, y - 4)], SOFT, 1.2)
    if words:
        drawing.text((left + right) / 2, y + 14, words, 12, SOFT)
