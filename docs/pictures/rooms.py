"""A picture of the four rooms, their sub-rooms and the arrows between them, from the tables in
tests/house/test_layout.py."""

from __future__ import annotations

from collections.abc import Iterator

from layers import Graph, Layout, layout, without_shortcuts
from svg import BLUE, GREEN, INK, ORANGE, PURPLE, SOFT, TINTS, Drawing, Point

from lockstep.tests.house.test_layout import PLACES, ROOMS

BOX_HEIGHT, ROW = 28, 56
FIELD, GAP, MARGIN = 20, 34, 24  # around a room's places; between two rooms; around all
LETTER = 7.6  # width of one
COLOURS = {"integration": PURPLE, "rollout": BLUE, "weight_sync": GREEN, "kernels": ORANGE}
SAYS = {
    "integration": "knows every other room; none of them imports it",
    "rollout": "generates",
    "weight_sync": "moves weights",
    "kernels": "torch, Triton and C++; nothing of ours",
}


def graph_of(room: str) -> dict[str, set[str]]:
    """Return the sub-rooms and modules of a room by their first name, each with the others that it imports."""
    graph: dict[str, set[str]] = {}
    for place, targets in PLACES.items():
        its_room, name, *_ = place.split(".")
        if its_room == room:
            graph.setdefault(name, set()).update(target.split(".")[0] for target in targets.split())
    return {name: targets - {name} for name, targets in graph.items()}


class Room:
    """The layout of a room's places, and its size on the page."""

    def __init__(self, name: str) -> None:
        graph = graph_of(name)
        joined = {place for targets in graph.values() for place in targets} | {p for p, t in graph.items() if t}
        self.name = name
        self.alone = sorted(set(graph) - joined)  # neither import nor are imported within the room
        self.layout = _layout({p: t for p, t in graph.items() if p in joined})
        self.column = max(LETTER * len(place) for place in graph) + 24
        self.num_rows = 1 + max(row for _, row in self.layout.spots.values())
        self.width = self.layout.num_columns * self.column + 2 * FIELD - 14
        self.height = 46 + self.num_rows * ROW - (ROW - BOX_HEIGHT) + (38 if self.alone else 0) + FIELD

    def draw(self, drawing: Drawing, x: float, y: float, width: float) -> None:
        """Draw the room with this upper left corner and width."""
        colour = COLOURS[self.name]
        drawing.rect(x, y, width, self.height, TINTS[colour], colour, 10)
        drawing.text(x + FIELD, y + 22, f"{self.name}/", 17, colour, "start", bold=True)
        drawing.text(x + FIELD + 12 * len(self.name) + 24, y + 23, SAYS[self.name], 13, SOFT, "start")
        left, top = x + (width - self.layout.num_columns * self.column) / 2, y + 46

        def at(point: tuple[float, int]) -> Point:
            return left + (point[0] + 0.5) * self.column, top + point[1] * ROW

        for route in self.layout.routes:
            drawing.path(_smooth([at(point) for point in route]), SOFT, 1.2, arrow=True)
        for place, spot in self.layout.spots.items():
            self._box(drawing, place, *at(spot))
        middle = x + width / 2 - (len(self.alone) - 1) * self.column / 2
        for number, place in enumerate(self.alone):
            self._box(drawing, place, middle + number * self.column, y + self.height - FIELD - BOX_HEIGHT)

    def _box(self, drawing: Drawing, place: str, x: float, y: float) -> None:
        width = LETTER * len(place) + 20
        drawing.rect(x - width / 2, y, width, BOX_HEIGHT, "#ffffff", COLOURS[self.name])
        drawing.text(x, y + BOX_HEIGHT / 2, place, 13, INK)


def draw() -> Drawing:
    """Draw integration at the top, rollout beside weight_sync, kernels at the bottom."""
    assert set(ROOMS) == set(COLOURS), "every room needs a place in the picture"
    rooms = {name: Room(name) for name in ROOMS}
    inner = max(
        rooms["integration"].width, rooms["kernels"].width, rooms["rollout"].width + GAP + rooms["weight_sync"].width
    )
    first = MARGIN + 62
    second = first + rooms["integration"].height + GAP
    third = second + max(rooms["rollout"].height, rooms["weight_sync"].height) + GAP
    height = third + rooms["kernels"].height + MARGIN
    drawing = Drawing(inner + 2 * MARGIN, height, "The four rooms, their sub-rooms and the arrows between them")
    drawing.text(MARGIN, 32, "The rooms", 18, INK, "start", bold=True)
    drawing.text(MARGIN, 58, "An arrow: imports. It points down. An arrow that follows from others is left out.", 13,
                 SOFT, "start")  # fmt: skip
    share = inner - GAP - rooms["weight_sync"].width
    spots = {
        "integration": (MARGIN, first, inner),
        "rollout": (MARGIN, second, share),
        "weight_sync": (MARGIN + share + GAP, second, rooms["weight_sync"].width),
        "kernels": (MARGIN, third, inner),
    }
    for name, (x, y, width) in spots.items():
        rooms[name].draw(drawing, x, y, width)
    for above, below in _between(rooms):
        left, _, width = min((spots[above], spots[below]), key=lambda spot: spot[2])  # the narrower one's middle
        x = left + width / 2
        drawing.arrow([(x, spots[above][1] + rooms[above].height), (x, spots[below][1] - 1)], INK, 2.4)
    return drawing


def _between(rooms: dict[str, Room]) -> Iterator[tuple[str, str]]:
    """Return the arrows between rooms that do not follow from other arrows."""
    graph = without_shortcuts({name: ROOMS[name] - {name} for name in rooms})
    for above in graph:
        for below in sorted(graph[above]):
            yield above, below


def _layout(graph: Graph) -> Layout:
    return layout(without_shortcuts(graph))


def _smooth(points: list[Point]) -> str:
    """Return a curve from the first box's lower edge to the last box's upper edge, vertical where it passes a row."""
    (x, y), *rest = points
    y += BOX_HEIGHT
    path = f"M{x:.1f} {y:.1f}"
    for number, (next_x, next_y) in enumerate(rest):
        end = next_y - 1 if number == len(rest) - 1 else next_y
        bend = (end - y) / 2
        path += f" C{x:.1f} {y + bend:.1f} {next_x:.1f} {end - bend:.1f} {next_x:.1f} {end:.1f}"
        x, y = next_x, end
        if number < len(rest) - 1:
            y += BOX_HEIGHT
            path += f" L{x:.1f} {y:.1f}"
    return path
