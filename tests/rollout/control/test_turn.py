"""Threads that call an engine which was not started: one of them runs the steps for all, and passes that on."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lockstep.rollout.completion import Completion
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import PATIENCE, wait_until

NUM_CALLS = 8
LONG = 400  # tokens


def params(num_new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, ignore_eos=True)


def waiting_calls(engine: Engine, threads: ThreadPoolExecutor, lengths: list[int]) -> list[Future[list[Completion]]]:
    """Begin calls of these lengths, which wait since the engine is paused."""
    engine.pause_generation("in_place")
    calls = [threads.submit(engine.generate, [[1, 2, n]], params(length)) for n, length in enumerate(lengths)]
    wait_until(lambda: engine.driver._waiters.num_waiting == len(lengths))
    return calls


def lengths_of(calls: list[Future[list[Completion]]]) -> list[int]:
    return [len(call.result(PATIENCE)[0].token_ids) for call in calls]


def test_threads_do_not_cut_each_others_schedules_short(engine, monkeypatch):
    schedules, run = 0, engine.gate.step

    def step(most: int) -> None:
        nonlocal schedules
        schedules += 1
        run(most)

    with ThreadPoolExecutor(NUM_CALLS) as threads:
        calls = waiting_calls(engine, threads, [LONG] * NUM_CALLS)
        monkeypatch.setattr(engine.gate, "step", step)
        engine.continue_generation()
        assert lengths_of(calls) == [LONG] * NUM_CALLS
    assert schedules < engine.metrics.num_steps / 6  # of 8 steps each, but for those in which a call begins or ends


def test_each_thread_that_has_its_answer_passes_the_turn_on(engine):
    lengths = [20 * (n + 1) for n in range(NUM_CALLS)]
    with ThreadPoolExecutor(NUM_CALLS) as threads:
        calls = waiting_calls(engine, threads, lengths)
        engine.continue_generation()
        assert lengths_of(calls) == lengths


def test_a_thread_whose_step_fails_passes_the_turn_on(engine, monkeypatch):
    failing, run = [], engine.gate.step

    def step(most: int) -> None:
        if not failing:
            failing.append(threading.current_thread())
            raise KeyboardInterrupt("planned")
        run(most)

    with ThreadPoolExecutor(NUM_CALLS) as threads:
        calls = waiting_calls(engine, threads, [20] * NUM_CALLS)
        monkeypatch.setattr(engine.gate, "step", step)
        engine.continue_generation()
        ends = [call.exception(PATIENCE) for call in calls]
    assert sorted(type(end).__name__ for end in ends) == ["KeyboardInterrupt"] + ["NoneType"] * (NUM_CALLS - 1)


def test_a_thread_that_is_interrupted_twice_passes_the_turn_on(engine, monkeypatch):
    interrupts, run, wake = [], engine.gate.step, engine.driver._wake

    def step(most: int) -> None:
        if not interrupts:
            interrupts.append("in the step")
            raise KeyboardInterrupt("planned")
        run(most)

    def interrupted() -> None:
        if interrupts == ["in the step"]:
            interrupts.append("as it passes the turn on")
            raise KeyboardInterrupt("planned")
        wake()

    with ThreadPoolExecutor(NUM_CALLS) as threads:
        calls = waiting_calls(engine, threads, [20] * NUM_CALLS)
        monkeypatch.setattr(engine.gate, "step", step)
        monkeypatch.setattr(engine.driver, "_wake", interrupted)
        engine.continue_generation()
        ends = [call.exception(PATIENCE) for call in calls]
    assert len(interrupts) == 2 and sum(end is None for end in ends) == NUM_CALLS - 1


def test_an_answer_that_is_there_is_not_lost_to_an_update_that_begins(engine):
    def refuse() -> None:
        raise SamplingRefused("an update has begun, and is not whole")

    engine.add([1, 2, 3], params(4))
    engine.gate.before_sampling = refuse
    engine.driver.wait_until(lambda: True)
    with pytest.raises(SamplingRefused):
        engine.driver.wait_until(lambda: False)
    engine.gate.before_sampling = None
    with ThreadPoolExecutor(1) as threads:
        assert lengths_of([threads.submit(engine.generate, [[1, 2]], params(6))]) == [6]


def test_coroutines_have_their_answers_while_a_thread_has_the_turn(engine):
    async def run() -> list[list[Completion]]:
        return await asyncio.gather(*[engine.agenerate([[3, n]], params(8)) for n in range(3)])

    with ThreadPoolExecutor(1) as threads:
        [call] = waiting_calls(engine, threads, [LONG])
        engine.continue_generation()
        answers = asyncio.run(run())
        assert not call.done() and [len(one[0].token_ids) for one in answers] == [8, 8, 8]
        assert lengths_of([call]) == [LONG]


def test_threads_go_on_by_themselves_where_the_engines_own_thread_is_stopped(engine):
    with ThreadPoolExecutor(NUM_CALLS) as threads:
        calls = waiting_calls(engine, threads, [LONG] * NUM_CALLS)
        engine.start()
        engine.continue_generation()
        wait_until(lambda: engine.metrics.num_steps > 8)
        engine.stop()
        assert not any(call.done() for call in calls)
        assert lengths_of(calls) == [LONG] * NUM_CALLS


def test_a_started_thread_takes_the_steps_over(engine):
    with ThreadPoolExecutor(NUM_CALLS) as threads:
        calls = waiting_calls(engine, threads, [LONG] * NUM_CALLS)
        engine.continue_generation()
        wait_until(lambda: engine.metrics.num_steps > 8)
        engine.start()
        assert lengths_of(calls) == [LONG] * NUM_CALLS
        engine.stop()
        assert lengths_of([threads.submit(engine.generate, [[1]], params(4))]) == [4]
