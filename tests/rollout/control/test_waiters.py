"""Callers of a started engine: each is woken for its own answer, takes no thread to wait, and hears why it waits."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.control import long_waits
from lockstep.rollout.control.desk.mailboxes import Mailboxes
from lockstep.rollout.control.fair_lock import FairLock
from lockstep.rollout.control.waiters import Waiters
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import EngineStopped
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import PATIENCE, wait_until

NUM_CALLS = 8
LONG = 400  # tokens


@pytest.fixture
def engine(engine):
    engine.start()
    return engine


def params(num_new: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, sampling_seed=seed, ignore_eos=True)


def test_threads_that_wait_do_not_cut_the_schedules_short(engine, monkeypatch):
    schedules, run = 0, engine.gate.step

    def step(most: int) -> None:
        nonlocal schedules
        schedules += 1
        run(most)

    monkeypatch.setattr(engine.gate, "step", step)
    with ThreadPoolExecutor(NUM_CALLS) as threads:
        engine.pause_generation("in_place")
        calls = [threads.submit(engine.generate, [[1, 2, n]], params(LONG)) for n in range(NUM_CALLS)]
        engine.continue_generation()
        answers = [call.result() for call in calls]
    assert all(len(one[0].token_ids) == LONG for one in answers)
    assert schedules < engine.metrics.num_steps / 6  # of 8 steps each, but for those in which a call begins or ends


def test_a_stream_goes_on_while_more_coroutines_wait_than_the_event_loop_has_threads(engine):
    async def run() -> tuple[int, int]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        calls = [asyncio.create_task(engine.agenerate([[1, 2, n]], params(LONG))) for n in range(NUM_CALLS)]
        num_chunks = 0
        async for _ in engine.astream([3, 4], params(8)):
            num_chunks += 1
        num_waiting = sum(not call.done() for call in calls)
        await asyncio.gather(*calls)
        return num_chunks, num_waiting

    num_chunks, num_waiting = asyncio.run(run())
    assert num_chunks >= 2 and num_waiting == NUM_CALLS


def test_coroutines_go_on_where_a_thread_is_started_before_their_shared_step_has_begun(make_model, restore_threads):
    torch.set_num_threads(1)
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="80 blocks", speculation="off"))
    has_begun, may_end = threading.Event(), threading.Event()

    def commit() -> None:  # as of an update's weights before the next step
        has_begun.set()
        may_end.wait()
        engine.gate.before_sampling = None

    async def run() -> list[int]:
        engine.gate.before_sampling = commit
        calls = [asyncio.create_task(engine.agenerate([[1, 2, n]], params(20))) for n in range(3)]
        await asyncio.to_thread(has_begun.wait)
        engine.start()
        may_end.set()
        answers = await asyncio.wait_for(asyncio.gather(*calls), timeout=PATIENCE)
        return [len(one[0].token_ids) for one in answers]

    with engine.model.rollout_phase():
        assert asyncio.run(run()) == [20, 20, 20]
        engine.close()


def test_the_end_of_a_call_wakes_no_other(engine):
    num_asked = 0

    def count() -> bool:  # by each wake and each look of the thread that runs the steps
        nonlocal num_asked
        num_asked += threading.current_thread().name != "lockstep-loop"
        return has_ended.is_set()

    async def run() -> None:
        waiting = asyncio.create_task(engine.driver.progress(count))
        await asyncio.gather(*[engine.agenerate([[1, 2, n]], params(4)) for n in range(NUM_CALLS)])
        assert not waiting.done() and num_asked == 1
        has_ended.set()
        await engine.agenerate([[1, 2]], params(4))
        await waiting

    has_ended = threading.Event()
    asyncio.run(run())


def test_coroutines_hear_of_the_loops_end(engine, monkeypatch):
    def fail(most: int) -> None:
        raise RuntimeError("planned")

    async def run() -> None:
        calls = [asyncio.create_task(engine.agenerate([[1, 2, n]], params(LONG))) for n in range(NUM_CALLS)]
        while not engine.metrics.num_steps:
            await asyncio.sleep(0)
        monkeypatch.setattr(engine.gate, "step", fail)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineStopped] * NUM_CALLS

    asyncio.run(run())


def test_a_coroutine_has_its_aborted_answer_when_the_engine_closes(engine):
    async def run() -> None:
        call = asyncio.create_task(engine.agenerate([[1, 2]], params(LONG)))
        while not engine.has_work:
            await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        [answer] = await call
        assert answer.finish_reason.type == "abort"

    asyncio.run(run())


def test_a_cancelled_coroutine_leaves_no_waiter(engine):
    async def run() -> None:
        call = asyncio.create_task(engine.agenerate([[1, 2]], params(LONG)))
        while not engine.has_work:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
    assert not engine.has_work and not engine.state()["num_running"]
    [answer] = engine.generate([[1, 2]], params(4))
    assert len(answer.token_ids) == 4


def test_a_waiter_whose_event_loop_was_closed_harms_no_other():
    lock = FairLock()
    waiters, has_ended = Waiters(lock), threading.Event()
    loop = asyncio.new_event_loop()
    left = loop.create_task(waiters.wait_in_coroutine(lambda: True, lambda: True))
    left.cancel()  # before it began
    stuck = loop.create_task(waiters.wait_in_coroutine(has_ended.is_set, lambda: True))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    has_ended.set()
    with lock:
        waiters.wake_done()
        waiters.wake_all()
    assert not stuck.done() and not waiters.num_waiting
    stuck.get_coro().close()


@pytest.mark.parametrize("kept_by", ["phase", "pause", "refusal"])
def test_requests_that_wait_for_long_say_why(make_model, restore_threads, monkeypatch, caplog, kept_by):
    torch.set_num_threads(1)
    monkeypatch.setattr(long_waits, "FIRST_S", 0.05)
    engine = Engine(make_model("qwen3").train(), EngineConfig(kv_cache="80 blocks"))

    def told() -> list[str]:
        return [one for one in caplog.messages if "requests have waited" in one]

    with ExitStack() as phase:
        if kept_by != "phase":
            phase.enter_context(engine.model.rollout_phase())
        if kept_by == "pause":
            engine.pause_generation("in_place")
        if kept_by == "refusal":
            engine.between_steps("open", lambda: engine.gate.refuse("update", "an update is open"))
        engine.start()
        wait_until(lambda: engine.driver.is_started)
        assert not told()  # no request waits
        engine.add([1, 2], params(4))
        wait_until(lambda: len(told()) == 2)
        why = {"phase": "rollout_phase()", "pause": "paused (in_place)", "refusal": "an update is open"}
        assert all(why[kept_by] in one for one in told())
        if kept_by == "phase":
            phase.enter_context(engine.model.rollout_phase())
        if kept_by == "pause":
            engine.continue_generation()
        if kept_by == "refusal":
            engine.between_steps("end", lambda: engine.gate.lift(["update"]))
        wait_until(lambda: not engine.has_work)
        engine.close()


def test_a_call_of_many_prompts_looks_at_each_answer_once_however_many_steps_it_waits(engine, monkeypatch):
    class Counting(dict):
        num_reads = 0

        def __getitem__(self, id: str) -> object:
            Counting.num_reads += 1
            return super().__getitem__(id)

    monkeypatch.setattr(engine.mailboxes, "_boxes", Counting())
    prompts = [[1, 2, 3 + n % 60] for n in range(150)]
    before = engine.metrics.num_steps
    engine.generate(prompts, [params(1 + n % 5) for n in range(len(prompts))])
    num_steps = engine.metrics.num_steps - before
    assert num_steps > 20 and Counting.num_reads <= 4 * (len(prompts) + num_steps)


def test_two_threads_that_ask_at_once_whether_all_is_done_hear_the_same():
    looks, may_go_on = threading.Event(), threading.Event()

    class Slow(dict):
        def __getitem__(self, id: str) -> object:
            if threading.current_thread() is not threading.main_thread():
                looks.set()
                assert may_go_on.wait(PATIENCE)
            return super().__getitem__(id)

    mailboxes, ids = Mailboxes(threading.RLock()), ["a", "b", "c"]
    mailboxes._boxes = Slow(mailboxes.open(ids, streamed=False))
    for id in ids:
        mailboxes._boxes[id].chunks.append(SimpleNamespace(completion="done"))
    are_done = mailboxes.when_done(ids)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(are_done)
        assert looks.wait(PATIENCE) and are_done()
        may_go_on.set()
        assert other.result(PATIENCE) and are_done()
