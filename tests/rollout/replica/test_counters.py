"""A test of the published example of both counters on two real ranks: 1000 tokens in two chunks through two stages."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

PATIENCE = 60.0  # seconds, far longer than any test here takes


class Points:
    """The points at which the two ranks wait for each other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.begun, self.may_run, self.now, self.noted = ([context.Event() for _ in range(4)] for _ in range(4))

    @staticmethod
    def wait(event) -> None:
        assert event.wait(PATIENCE)


def first_stage(engine: Engine, points: Points) -> list[tuple[int, int]]:
    """Return the controller's (step, stage) counters at the four times of the example."""
    trace, num_forwards = [], [0]

    def note() -> None:
        sequence = engine.parts.sequences.sequence("a")
        trace.append((sequence.num_tokens_step_processed, sequence.num_tokens_stage_processed))
        points.now[len(trace) - 1].set()
        points.wait(points.noted[len(trace) - 1])

    def before_forward(*_: object) -> None:
        num_forwards[0] += 1
        if num_forwards[0] == 1:
            note()  # time 0: the first stage starts tokens 0-500
        elif num_forwards[0] == 2:
            points.wait(points.begun[0])
            note()  # time 1: it has completed them, and the second stage starts them
            points.may_run[0].set()
        elif num_forwards[0] == 3:
            note()  # time 3: the second stage has completed tokens 500-1000; a decode comes next

    engine.model.module.base_model.register_forward_pre_hook(before_forward)
    engine.add([i % 250 for i in range(1000)], SamplingParams(max_new_tokens=2, ignore_eos=True), rid="a")
    engine.step()  # the first chunk is delivered
    points.wait(points.begun[1])
    note()  # time 2: the first stage has completed tokens 500-1000, the second 0-500
    assert engine.parts.sequences.request("a").sequence.num_output_tokens == 0
    for event in points.may_run[1:]:
        event.set()
    while engine.has_work:
        engine.step()
    return trace


def second_stage(engine: Engine, points: Points, until: Callable[..., None]) -> list[tuple[int, int]]:
    """Return the follower's (step, stage) counters. It learns the step counter with the controller's next message."""
    trace, num_forwards, workers = [], [0], engine.parts.runner.stage.workers

    def before_forward(*_: object) -> None:
        points.begun[num_forwards[0]].set()
        points.wait(points.may_run[num_forwards[0]])
        num_forwards[0] += 1

    def counters() -> tuple[int, int]:
        if "a" not in workers:
            return (0, 0)
        sequence = workers.sequence("a")
        return (sequence.num_tokens_step_processed, sequence.num_tokens_stage_processed)

    def note_times() -> None:
        for now, noted in zip(points.now, points.noted, strict=True):
            points.wait(now)
            if now is points.now[-1]:  # the decode's message, which reports it, has not arrived
                until(lambda: counters()[0] == 1000)
            trace.append(counters())
            noted.set()

    engine.model.module.base_model.register_forward_pre_hook(before_forward)
    notes = threading.Thread(target=note_times, daemon=True)
    notes.start()
    engine.follow()
    notes.join(PATIENCE)
    return trace


def test_thousand_tokens_pass_two_real_ranks_as_in_the_published_example(make_model, run_world, until):
    model, points = make_model("qwen3", max_position_embeddings=1024), Points()
    config = EngineConfig(pp=2, kv_cache="70 blocks", chunked_prefill_size=500, max_num_batched_tokens=500)

    def rank(rank: int) -> object:
        engine = Engine(model, config)
        trace = second_stage(engine, points, until) if rank else first_stage(engine, points)
        engine.close()
        return trace

    first, second = run_world(2, rank)
    assert first == [(0, 0), (0, 500), (500, 1000), (1000, 1000)]
    assert [stage for _, stage in second] == [0, 0, 500, 1000]
    assert [step for step, _ in second] == [0, 0, 0, 1000]
