"""A picture of the states of a sequence and its moves between them, from the table in rollout/sequences/sequence.py."""

from __future__ import annotations

from svg import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SOFT, Drawing, Point

from lockstep.rollout.sequences.sequence import HOLDS_BLOCKS, TERMINAL, TRANSITIONS, State

WIDTH, HEIGHT = 176, 66
PLACES: dict[State, Point] = {  # middle of the box
    State.WAITING: (118, 240),
    State.RUNNING: (428, 240),
    State.PAUSED: (748, 240),
    State.FINISHED: (588, 92),
    State.WAITING_PREEMPT: (588, 390),
    State.IGNORED: (118, 390),
}
SAYS = {
    State.WAITING: "arrived, holds no block",
    State.RUNNING: "in the step being run",
    State.PAUSED: "between two steps",
    State.FINISHED: "answered, holds no block",
    State.WAITING_PREEMPT: "keeps its tokens",
    State.IGNORED: "could never have run",
}
W, H = WIDTH / 2, HEIGHT / 2
# How each move is drawn: the points of its line, relative to the middles of the two boxes; its words, and where.
MOVES: dict[tuple[State, State], tuple[list[Point], list[Point], str, Point]] = {
    (State.WAITING, State.RUNNING): ([(W, 0)], [(-W, 0)], "scheduled", (273, 228)),
    (State.WAITING, State.IGNORED): ([(0, H)], [(0, -H)], "too long for the pool", (206, 316)),
    (State.WAITING, State.FINISHED): ([(0, -H), (0, -148)], [(-W, 0)], "aborted while it waited", (230, 80)),
    (State.RUNNING, State.PAUSED): ([(W, -12)], [(-W, -12)], "step done", (588, 216)),
    (State.PAUSED, State.RUNNING): ([(-W, 12)], [(W, 12)], "next step", (588, 265)),
    (State.RUNNING, State.FINISHED): ([(30, -H)], [(-56, H)], "stop, length, abort", (410, 160)),
    (State.PAUSED, State.FINISHED): ([(-30, -H)], [(56, H)], "aborted", (722, 160)),
    (State.RUNNING, State.WAITING_PREEMPT): ([(56, H)], [(-20, -H)], "", (0, 0)),
    (State.PAUSED, State.WAITING_PREEMPT): ([(-30, H)], [(56, -H)], "retracted: gives", (766, 312)),
    (State.WAITING_PREEMPT, State.RUNNING): ([(-W, 0)], [(0, 150), (0, H)], "scheduled again", (430, 408)),
    (State.WAITING_PREEMPT, State.FINISHED): ([(W, 0)], [(300, 298), (300, 0), (W, 0)], "aborted", (846, 408)),
}


def draw() -> Drawing:
    """Draw every state and every move of the table; a state or move without a place here is an error."""
    assert set(PLACES) == set(State), "every state needs a place in the picture"
    assert set(MOVES) == {(a, b) for a in TRANSITIONS for b in TRANSITIONS[a]}, "every move needs a line"
    drawing = Drawing(920, 470, "The states of a sequence and the moves between them")
    drawing.text(24, 30, "States of a sequence", 18, INK, "start", bold=True)
    for (start, end), (leaving, arriving, words, where) in MOVES.items():
        (ax, ay), (bx, by) = PLACES[start], PLACES[end]
        points = [(ax + x, ay + y) for x, y in leaving] + [(bx + x, by + y) for x, y in arriving]
        drawing.arrow(points, RED if end is State.FINISHED else SOFT)
        drawing.text(*where, words, 13, SOFT)
    drawing.text(766, 329, "its blocks back", 13, SOFT)
    for state, (x, y) in PLACES.items():
        drawing.box(x - W, y - H, WIDTH, HEIGHT, (state.name, SAYS[state]), _colour(state))
    kinds = (("holds KV blocks", GREEN), ("queued, holds none", ORANGE), ("ended", BLUE))
    for number, (words, colour) in enumerate(kinds):
        drawing.box(24 + 200 * number, 441, 18, 14, "", colour)
        drawing.text(50 + 200 * number, 448, words, 13, SOFT, "start")
    return drawing


def _colour(state: State) -> str:
    kinds = ((HOLDS_BLOCKS, GREEN), ({State.WAITING, State.WAITING_PREEMPT}, ORANGE), (TERMINAL, BLUE))
    return next((colour for kind, colour in kinds if state in kind), PURPLE)
