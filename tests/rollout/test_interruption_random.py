"""Random traces of all events of an engine, checked after every event, and replayed from their log."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.tests.rollout.random_traces import WEIGHTS, Trace, make_engine


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


# Seed, overlap and stages: a share of the events for each way to run steps, or all of them. Without drafts a schedule
# may have several steps.
EACH_WAY = [(0, False, 1), (1, True, 1), (7, False, 2), (9, False, 4)]
WITHOUT_DRAFTS = {0, 2, 6}  # seeds
ALONE = [*EACH_WAY, *((seed, seed % 2 == 1, 1) for seed in range(2, 7)), (8, False, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(EACH_WAY, id="each-way"),
        *(pytest.param([case], id="{}-{}-{}".format(*case), marks=pytest.mark.exhaustive) for case in ALONE),
    ],
)
def test_ten_thousand_random_events_lose_nothing(in_stages, cases):
    counts, num_replayed = Counter(), 0
    for seed, overlap, num_stages in cases:
        speculation = "off" if seed in WITHOUT_DRAFTS else "auto"
        trace, dice = Trace(make_engine(overlap, in_stages(num_stages), speculation)), random.Random(seed)
        names = dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=10_000 // len(cases))
        for index, name in enumerate(names):
            trace.event(name, dice.randrange(10_000))
            if index % 1250 == 1249:
                num_replayed += len(trace.kinds)
                trace.check_replay()
        trace.drain()
        trace.check_replay()
        assert set(trace.answers) == {"length", "abort", "ignored"} and min(trace.answers.values()) > 10, trace.answers
        counts += trace.counts
    assert num_replayed > 0
    assert WITHOUT_DRAFTS.isdisjoint(seed for seed, *_ in cases) or counts["several"] > 50
    assert counts["pinned"] > 100 and counts["unpinned"] > 10
    assert counts["preempted"] > counts["retracted"] > 0, "blocks never ran out"


@pytest.mark.parametrize(
    ("overlap", "num_stages", "speculation"),
    [(False, 1, "auto"), (False, 1, "off"), (True, 1, "auto"), (False, 2, "auto"), (False, 3, "auto")],
    ids=["plain", "without drafts", "overlap", "2 stages", "3 stages"],
)
def test_short_traces_that_shrink(in_stages, overlap, num_stages, speculation):
    """Run the same traces as hypothesis generates them: a failing one shrinks to the few events that matter."""
    trace = Trace(make_engine(overlap, in_stages(num_stages), speculation))

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(0, 9999)), max_size=60))
    def run(events: list[tuple[str, int]]) -> None:
        nonlocal trace
        try:
            for name, number in events:
                trace.event(name, number)
            trace.check_replay()
            trace.drain()
        except BaseException:
            trace = Trace(
                make_engine(overlap, in_stages(num_stages), speculation)
            )  # the next trace, perhaps a shrunk one, starts afresh
            raise
        trace.engine.parts.managers.log.clear()

    run()
