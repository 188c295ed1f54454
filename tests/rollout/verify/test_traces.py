"""Random traces of steps, arrivals, pauses, aborts and verifying commits: each answer is its weights' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lockstep.rollout.engine import Engine
from lockstep.tests.rollout.speculation.drafting import Play, play
from lockstep.tests.rollout.speculation.test_equality import GROUPS, WAYS

NOISE = (0.0, 1e-7, 0.01, 0.05, 1.0)  # of the weights of a version, relative to the first: equal ones to all others
EVENTS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.just("commit"), st.integers(0, len(NOISE) - 1)),
    st.tuples(st.just("commit paused by retract"), st.integers(0, len(NOISE) - 1)),
    st.tuples(st.just("commit paused in_place"), st.integers(0, len(NOISE) - 1)),
    st.tuples(st.sampled_from(["retract", "in_place"]), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("arrive"), st.integers(0, 1)),
)


class Weights:
    """Versions of one model's weights, written into its storage."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.now = model, 0
        self._first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def write(self, number: int) -> None:
        self.now = number
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.copy_(self._first[name] * (1 + NOISE[number] * noise))


@pytest.fixture
def weights(small) -> Iterator[Weights]:
    found = Weights(small("qwen3", torch.float32))
    yield found
    found.write(0)


class Trace:
    """A run of random events. The version under which each answer came is noted."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self.engine, self.weights, self.run = engine, weights, Play(engine)
        self.came_under: dict[str, int] = {}
        self.num_groups = 0

    def event(self, name: str, number: int) -> None:
        engine = self.engine
        if name == "steps":
            for _ in range(number):
                self.run.step()
        elif name == "arrive" and self.num_groups < 3:
            self.run.add(GROUPS[number], f"{number}-{self.num_groups}-")
            self.num_groups += 1
        elif name == "abort" and (open_ids := sorted(self.run.texts.keys() - self.run.answers.keys())):
            engine.abort_request(open_ids[number % len(open_ids)])
        elif name in ("retract", "in_place"):
            engine.pause_generation(name)
            engine.continue_generation()
        elif name.startswith("commit"):
            self._note()
            if mode := name.removeprefix("commit paused ").removeprefix("by ").removeprefix("commit"):
                engine.pause_generation(mode)
            with torch.no_grad():
                engine.between_steps("write", lambda: self.weights.write(number))
            engine.weights.commit_weights(str(number), None, in_flight="verify")
            if mode:
                engine.continue_generation()
        self.run.look()
        self._note()

    def _note(self) -> None:
        for id in self.run.answers.keys() - self.came_under.keys():
            self.came_under[id] = self.weights.now

    def end(self) -> dict[str, tuple]:
        records = self.run.to_the_end()
        self._note()
        return records


_expected: dict[int, list[dict[str, tuple]]] = {}


def expected(make_engine, weights: Weights, number: int) -> list[dict[str, tuple]]:
    """Return the records of both groups in an engine that has these weights from the start."""
    if number not in _expected:
        before = weights.now
        weights.write(number)
        engine = make_engine(weights.model, speculation="off")
        engine.weights.commit_weights(str(number), None)
        _expected[number] = [play(engine, group) for group in GROUPS]
        engine.close()
        weights.write(before)
    return _expected[number]


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("pool", ["128 blocks", "20 blocks"])
def test_each_answer_is_the_one_of_its_weights(make_engine, weights, way, pool):
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(events=st.lists(EVENTS, min_size=8, max_size=30), speculation=st.sampled_from(["auto", "off"]))
    def check(events: list[tuple[str, int]], speculation: str) -> None:
        weights.write(0)
        engine = make_engine(weights.model, speculation=speculation, **{**WAYS[way], "kv_cache": pool})
        engine.weights.commit_weights("0", None)
        with engine.model.rollout_phase():
            trace = Trace(engine, weights)
            trace.event("arrive", 0)
            for event in events:
                trace.event(*event)
            records = trace.end()
        engine.close()
        for id, found in records.items():
            answer = trace.run.answers[id]
            if answer.finish_reason.type == "abort":
                continue
            group, _, rest = id.split("-", 2)
            assert found == expected(make_engine, weights, trace.came_under[id])[int(group)][f"r{rest}"], (id, events)

    check()
