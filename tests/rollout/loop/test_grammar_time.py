"""Tests of the limits on the processor time of grammars, by a clock of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.rollout.grammars.matcher import MAX_TOKEN_S
from lockstep.rollout.loop import grammar_time
from lockstep.rollout.loop.grammar_time import HURRIED_S, MAX_STEP_S, GrammarTime


class Sequences:
    """Sequences whose grammars take as long as they are told, and what each token of them may take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.now, self.limits = GrammarTime(), 0.0, {}
        monkeypatch.setattr(grammar_time, "thread_time", lambda: self.now)

    def take(self, id: str, seconds: float) -> float:
        """Let a sequence take its time; returns the limit of its token."""
        grammar = SimpleNamespace(limit=lambda limit: self.limits.update({id: limit}))
        with self.time.charged(SimpleNamespace(id=id, grammar=grammar)):
            self.now += seconds
        return self.limits[id]


@pytest.fixture
def sequences(monkeypatch):
    return Sequences(monkeypatch)


def test_tokens_are_hurried_once_the_grammars_of_a_step_have_taken_long(sequences):
    assert sequences.take("a", MAX_STEP_S / 2) == MAX_TOKEN_S and not sequences.time.is_spent
    assert sequences.take("b", MAX_STEP_S) == MAX_TOKEN_S and sequences.time.is_spent
    assert sequences.take("c", HURRIED_S / 2) == sequences.take("d", 2 * HURRIED_S) == HURRIED_S
    sequences.time.end_step(["a", "b", "c", "d"], 8)
    assert not sequences.time.is_spent
    assert sequences.take("a", 2 * MAX_STEP_S) == MAX_TOKEN_S
    assert sequences.take("c", 0.0) == HURRIED_S
    assert sequences.take("d", 0.0) == HURRIED_S  # also after a longer token: others took the time


def test_the_slowest_of_a_step_that_took_too_long_are_named_until_the_rest_would_not(sequences):
    seconds = {"a": 0.2, "b": 0.24, "c": 0.22, "d": 0.23, "e": 0.21, "f": 0.1}
    for id in seconds:
        sequences.take(id, seconds[id])
    found = sequences.time.end_step(list(seconds), 8)
    expected = [("b", 1), ("d", 0), ("c", 0), ("e", 0), ("a", 0), ("f", 0)]
    assert [(id, num_long) for id, _, num_long in found] == expected
    for num_long in (1, 2):
        sequences.take("a", MAX_TOKEN_S + 0.01)
        assert [number for _, _, number in sequences.time.end_step(["a"], 8)] == [num_long]
