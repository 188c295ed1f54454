"""Random traces of all events of an engine whose steps draft whenever they can, with right and wrong proposals."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lockstep.rollout.speculation.proposer import Proposal
from lockstep.tests.rollout.random_traces import WEIGHTS, Trace, make_engine, undisturbed
from lockstep.tests.rollout.speculation.drafting import Oracle, check_nothing_is_left, counts, draft_always


class Drafting(Trace):
    """A trace of an engine that drafts from the undisturbed outputs, spoiled in all ways."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        draft_always(engine, ByKind(self.kinds))

    def check(self) -> None:
        super().check()
        check_nothing_is_left(self.engine)


class ByKind(Oracle):
    """An oracle that knows the undisturbed outputs by the kinds of requests."""

    def __init__(self, kinds: dict[str, int]) -> None:
        super().__init__({}, vocab_size=64, spoil="any")
        self._kinds = kinds

    def propose(self, request, most: int) -> Proposal:
        self.outputs = {request.id: undisturbed(self._kinds[request.id]).token_ids}
        return super().propose(request, most)


EACH_WAY = [(0, False, 1), (1, True, 1), (7, False, 2), (9, False, 4)]  # seed, overlap, stages


def run(in_stages, cases, num_events: int) -> tuple[Counter, int]:
    """Run random events, a share for each case; returns counts, and the number of accepted tokens."""
    total, num_accepted = Counter(), 0
    for seed, overlap, num_stages in cases:
        trace, dice = Drafting(make_engine(overlap, in_stages(num_stages))), random.Random(seed)
        names = dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=num_events // len(cases))
        for index, name in enumerate(names):
            trace.event(name, dice.randrange(10_000))
            if index % 250 == 249:
                trace.check_replay()
        trace.drain()
        trace.check_replay()
        total += trace.counts
        assert counts(trace.engine)[1] > 0 and counts(trace.engine)[2] > 0
        num_accepted += counts(trace.engine)[1]
    return total, num_accepted


def test_a_thousand_random_events_with_drafts_lose_nothing(in_stages):
    _, num_accepted = run(in_stages, EACH_WAY, 1000)
    assert num_accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(EACH_WAY, id="each-way"),
        *(pytest.param([(seed, seed % 2 == 1, 1 + 2 * (seed % 3 == 0))], id=f"seed{seed}", marks=pytest.mark.exhaustive)
          for seed in range(20, 26) if seed != 21),
    ],
)  # fmt: skip
def test_ten_thousand_random_events_with_drafts_lose_nothing(in_stages, cases):
    total, num_accepted = run(in_stages, cases, 10_000)
    assert num_accepted > 1000
    assert total["preempted"] > total["retracted"] > 0, "blocks never ran out"
