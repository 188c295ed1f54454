"""Verbs of ranks that hold a model together: how long they wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.integration.weights.all_ranks import Replica, on_all_ranks, serve_verbs
from lockstep.rollout.ranks.controller_channel import ControllerChannel

RANK_S, WEIGHT_S = 8.0, 30.0  # the engine's timeout of ranks, and the service's of weights


class Ranks(ControllerChannel):
    """The channel of the first of two ranks, which keeps the waits that it is asked for."""

    def __init__(self, follow: bool) -> None:
        self.timeout_s, self.mesh = RANK_S, SimpleNamespace(local_rank=0, num_ranks=2)
        self.handlers: dict[str, Callable[..., object]] = {}
        self.waits: list[float] = []
        self._follow = follow

    def are_following(self, timeout_s: float, *, or_calling: bool = True) -> bool:
        return self._follow

    def gather_json(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        assert timeout_s is not None
        self.waits.append(timeout_s)
        return [value, value]

    def run_everywhere(self, verb: str, arguments: Any, timeout_s: float = 0.0) -> list[Any]:
        self.handlers[verb](**arguments)
        self.waits.append(timeout_s)
        return []


class Verbs:
    """A verb in which the ranks vote twice."""

    def __init__(self, ranks: Ranks) -> None:
        process = SimpleNamespace(check=lambda: None)
        engine = SimpleNamespace(
            ranks=ranks, driver=SimpleNamespace(process=process), between_steps=lambda what, action: action()
        )
        self.replica = Replica(engine, WEIGHT_S)
        serve_verbs(self)

    @on_all_ranks
    def receive(self, *, timeout_s: float | None = None) -> None:
        self.replica.peers.together("receive", self.report)

    @on_all_ranks
    def report(self) -> None:
        self.replica.gather("here")


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(("asked", "least"), [(1800.0, 1800.0), (None, WEIGHT_S), (0.5, WEIGHT_S)])
def test_ranks_wait_for_each_other_at_least_as_long_as_the_call_may_take(follow, asked, least):
    ranks = Ranks(follow)
    verbs = Verbs(ranks)
    verbs.receive(timeout_s=asked)
    votes = ranks.waits[:2]
    assert all(least < wait < least + RANK_S for wait in votes)  # a moment longer: all of them may need all of it
    assert ranks.waits[2:] == ([4 * votes[0]] if follow else [])  # of the answer of the whole verb
    ranks.waits.clear()
    verbs.report()
    assert ranks.waits[0] < WEIGHT_S + RANK_S  # the next call has its own


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), "soon", 1e300])
def test_a_time_that_no_thread_can_wait_for_leaves_the_ranks_a_finite_one(timeout_s):
    ranks = Ranks(follow=False)
    Verbs(ranks).receive(timeout_s=timeout_s)
    assert all(wait < 1e10 for wait in ranks.waits)
