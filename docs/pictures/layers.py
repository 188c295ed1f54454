"""Place a graph without circles in rows, every arrow downward and few of them crossing (Sugiyama's method)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

Graph = Mapping[str, set[str]]
_NUM_SWEEPS = 24


@dataclass(frozen=True)
class Layout:
    """The places of nodes and arrows. x counts in units of a box and its gap, y in rows from the top."""

    spots: dict[str, tuple[float, int]]  # middle of the box, row
    routes: list[list[tuple[float, int]]]  # an arrow's points from box to box, one a row
    num_columns: float


def without_shortcuts(graph: Graph) -> dict[str, set[str]]:
    """Return the arrows that do not follow from others: a -> c is left out where a -> b -> ... -> c."""
    reach: dict[str, set[str]] = {}

    def reached(node: str) -> set[str]:
        if node not in reach:
            reach[node] = set().union(*({n, *reached(n)} for n in graph[node])) if graph[node] else set()
        return reach[node]

    return {node: {n for n in targets if not any(n in reached(other) for other in targets)}
            for node, targets in graph.items()}  # fmt: skip


def layout(graph: Graph) -> Layout:
    """Place every node one row below the lowest node that points to it."""
    rows = _rows(graph)
    chains = [_chain(a, b, rows) for a in sorted(graph) for b in sorted(graph[a])]
    members: list[list[str]] = [[] for _ in range(max(rows.values()) + 1)]
    for node in sorted(rows):
        members[rows[node]].append(node)
    for chain in chains:
        for step, row in zip(chain[1:-1], range(rows[chain[0]] + 1, rows[chain[-1]]), strict=True):
            members[row].append(step)
    up: dict[str, list[str]] = {node: [] for row in members for node in row}
    down: dict[str, list[str]] = {node: [] for row in members for node in row}
    for chain in chains:
        for above, below in pairwise(chain):
            down[above].append(below)
            up[below].append(above)
    x = _columns(_ordered(members, up, down), up, down)
    spots = {node: (x[node], row) for node, row in rows.items()}
    routes = [[(x[node], rows[chain[0]] + step) for step, node in enumerate(chain)] for chain in chains]
    return Layout(spots, routes, max(x.values()) + 1)


def _rows(graph: Graph) -> dict[str, int]:
    """Return the row of each node: the length of the longest way to it from a node without incoming arrows."""
    rows: dict[str, int] = dict.fromkeys(graph, 0)
    for _ in graph:
        for node, targets in graph.items():
            for target in targets:
                rows[target] = max(rows[target], rows[node] + 1)
    return rows


def _chain(above: str, below: str, rows: Mapping[str, int]) -> list[str]:
    """Return the two ends of an arrow and a point in each row between them."""
    steps = [f"{above}>{below}@{row}" for row in range(rows[above] + 1, rows[below])]
    return [above, *steps, below]


def _ordered(members: list[list[str]], up: Mapping[str, list[str]], down: Mapping[str, list[str]]) -> list[list[str]]:
    """Sort each row by the mean place of its neighbours, downward and upward; keep the order with fewest crossings."""
    best, fewest = [list(row) for row in members], _num_crossings(members, down)
    for sweep in range(_NUM_SWEEPS):
        neighbours, order = (up, range(1, len(members))) if sweep % 2 == 0 else (down, range(len(members) - 2, -1, -1))
        for row in order:
            other = members[row - 1 if sweep % 2 == 0 else row + 1]
            place = {node: index / max(len(other) - 1, 1) for index, node in enumerate(other)}
            own = {node: index / max(len(members[row]) - 1, 1) for index, node in enumerate(members[row])}
            members[row].sort(key=lambda n: _mean([place[m] for m in neighbours[n]], own[n]))
        if (crossings := _num_crossings(members, down)) < fewest:
            best, fewest = [list(row) for row in members], crossings
    return best


def _num_crossings(members: list[list[str]], down: Mapping[str, list[str]]) -> int:
    count = 0
    for above, below in pairwise(members):
        place = {node: index for index, node in enumerate(below)}
        lines = [(i, place[m]) for i, node in enumerate(above) for m in down[node]]
        count += sum((a - c) * (b - d) < 0 for n, (a, b) in enumerate(lines) for c, d in lines[:n])
    return count


def _columns(members: list[list[str]], up: Mapping[str, list[str]], down: Mapping[str, list[str]]) -> dict[str, float]:
    """Give each node an x near its neighbours, in the order of its row; a bare point of an arrow needs less room."""
    x = {node: float(index) for row in members for index, node in enumerate(row)}
    for _ in range(60):
        for row in members:
            wanted = [_mean([x[m] for m in (*up[n], *down[n])], x[n]) for n in row]
            x.update(zip(row, _spread(row, wanted), strict=True))
    first = min(x.values())
    return {node: place - first for node, place in x.items()}


def _spread(row: list[str], wanted: list[float]) -> list[float]:
    """Return the places nearest to the wanted ones that keep order and distance of neighbours (isotonic regression)."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (0.28 if ">" in left and ">" in right else 0.62 if ">" in left + right else 1.0))
    groups: list[list[float]] = []  # sum and number of adjacent places
    for place, offset in zip(wanted, offsets, strict=True):
        groups.append([place - offset, 1.0])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    places = [total / count for total, count in groups for _ in range(round(count))]
    return [place + offset for place, offset in zip(places, offsets, strict=True)]


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
