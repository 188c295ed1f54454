"""Control commands: deadlines, one run per op_id, answers from any thread at any time, and a loop that never spins."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.control import driver
from lockstep.rollout.control.waiters import Kick
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import DeadlineExceeded, EngineStopped, OpIdTaken
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import soon, submit, wait_until

PATIENCE = 30.0  # seconds that nothing here comes near
LONG = 480  # tokens: a request that is still there when a test looks again
MODES = ("abort", "retract", "in_place")


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def make_engine(make_model):
    """Make engines in their rollout phase; in the end each is continued and its thread stopped."""
    with ExitStack() as undo:

        def make(**config: object) -> Engine:
            settings = {"kv_cache": "80 blocks", "max_num_seqs": 4, "max_num_batched_tokens": 128, **config}
            engine = Engine(make_model("qwen3").train(), EngineConfig(**settings))
            undo.enter_context(engine.model.rollout_phase())
            undo.callback(engine.stop)
            return engine

        yield make


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def background(make_engine, request) -> Engine:
    """Make an engine whose own thread runs the steps."""
    engine = make_engine(overlap=request.param)
    engine.start()
    return engine


def params(num_new: int = 8, seed: int = 0, **others: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, sampling_seed=seed, **others)


def assert_empty(engine: Engine) -> None:
    state = engine.state()
    assert (state["num_running"], state["num_waiting"], state["num_held_blocks"]) == (0, 0, 0)
    engine.check_integrity()


class Gate:
    """Block the model's forward, so that a step lasts as long as a test needs."""

    def __init__(self, engine: Engine) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        self._hook = engine.model.module.model.layers[0].register_forward_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE), "the test never let the forward go on"

    def open(self) -> None:
        self._hook.remove()
        self._open.set()


# -- deadlines -------------------------------------------------------------------------------------


def test_command_that_is_late_raises_and_never_runs(background):
    gate = Gate(background)
    [id] = background.add([1, 2, 3], params(LONG))
    assert gate.entered.wait(PATIENCE)
    started = time.monotonic()
    calls = [
        lambda: background.pause_generation("in_place", timeout_s=0.05),
        lambda: background.abort_request(id, timeout_s=0.05),
        lambda: background.flush_cache(timeout_s=0.05),
        lambda: background.continue_generation(timeout_s=0.05),
    ]
    for call in calls:
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            call()
    assert time.monotonic() - started < 5
    gate.open()
    background.continue_generation(timeout_s=PATIENCE)  # comes after all of them in the queue
    forwards = background.state()["num_forwards"]
    wait_until(lambda: background.state()["num_forwards"] > forwards + 2)
    assert not background.is_paused
    assert background.state()["running_ids"] == [id]
    assert background.metrics.num_aborted == 0


def test_late_command_stays_late_under_its_op_id(background):
    gate = Gate(background)
    [id] = background.add([1, 2, 3], params(LONG))
    assert gate.entered.wait(PATIENCE)
    with pytest.raises(DeadlineExceeded):
        background.abort_request(id, op_id="late", timeout_s=0.05)
    gate.open()
    with pytest.raises(DeadlineExceeded):
        background.abort_request(id, op_id="late", timeout_s=PATIENCE)
    assert background.state()["running_ids"] == [id]


def test_a_repeated_command_has_a_deadline_of_its_own(background):
    """It waited for the first one's answer however long that took to begin."""
    gate = Gate(background)
    background.add([1, 2, 3], params(LONG))
    assert gate.entered.wait(PATIENCE)
    first = submit(background.pause_generation, op_id="twice")
    wait_until(lambda: background.driver.inbox.is_interrupted(0))  # it waits for the step's end
    with pytest.raises(DeadlineExceeded, match=r"did not begin within 0\.05 s.*came first under its op_id"):
        background.pause_generation(op_id="twice", timeout_s=0.05)
    gate.open()
    report = soon(first)
    assert background.is_paused and background.pause_generation(op_id="twice", timeout_s=0.05) == report
    background.continue_generation()


def test_a_repeated_command_waits_for_one_that_has_begun_as_the_first_call_does(make_engine):
    engine, begun, may_end = make_engine(), threading.Event(), threading.Event()

    def run() -> str:
        begun.set()
        assert may_end.wait(PATIENCE)
        return "done"

    first = submit(engine.driver.command, "run", run, "twice", 5.0)
    assert begun.wait(PATIENCE)
    second = submit(engine.driver.command, "run", run, "twice", 0.01)
    with pytest.raises(TimeoutError):
        second.result(timeout=0.1)
    may_end.set()
    assert soon(first) == soon(second) == "done"


def test_deadline_ahead_changes_nothing(make_engine):
    engine = make_engine()
    assert engine.pause_generation("retract", timeout_s=60).mode == "retract"
    assert engine.continue_generation(timeout_s=60).was_paused


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_deadline_that_is_no_time_is_refused(make_engine, timeout_s):
    engine = make_engine()
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        engine.pause_generation("abort", timeout_s=timeout_s)
    assert not engine.is_paused


# -- one run per op_id -----------------------------------------------------------------------------


def test_same_op_id_runs_once_and_gets_the_same_answer(make_engine):
    engine = make_engine()
    engine.add([1, 2], params(), rid="first")
    report = engine.abort_request("first", op_id="a")
    assert report.aborted == ("first",)
    engine.add([1, 2], params(), rid="first")
    assert engine.abort_request("first", op_id="a") == report
    assert engine.state()["waiting_ids"] == ["first"]
    paused = engine.pause_generation("retract", op_id="p")
    assert engine.continue_generation(op_id="c").was_paused
    assert engine.pause_generation("retract", op_id="p") == paused
    assert not engine.is_paused
    assert engine.continue_generation(op_id="c").was_paused  # the answer of then
    assert engine.abort_request(abort_all=True, op_id="b").aborted == ("first",)


def test_an_op_id_that_stands_for_another_command_is_refused_and_nothing_runs(make_engine):
    engine = make_engine()
    engine.pause_generation(op_id="x")
    with pytest.raises(OpIdTaken, match="op_id 'x' stands for another operation: pause_generation"):
        engine.flush_cache(op_id="x")
    with pytest.raises(OpIdTaken, match="pause_generation with other arguments"):
        engine.pause_generation("in_place", op_id="x")
    assert engine.pause_mode == "retract"
    with pytest.raises(OpIdTaken):
        engine.continue_generation(op_id="x")
    assert engine.is_paused
    with pytest.raises(ValueError, match="op_id must not be empty"):
        engine.flush_cache(op_id="")


def test_same_op_id_of_an_abort_at_the_same_time_gets_one_answer(background):
    gate = Gate(background)
    ids = [background.add([i], params(LONG))[0] for i in range(6)]
    assert gate.entered.wait(PATIENCE)
    calls = [submit(background.abort_request, abort_all=True, op_id="once") for _ in range(8)]
    gate.open()
    assert {soon(call).aborted for call in calls} == {tuple(ids)}
    assert background.metrics.num_aborted == 6


def test_mistake_under_an_op_id_is_answered_as_one_each_time(make_engine):
    engine = make_engine()
    for _ in range(2):
        with pytest.raises(ValueError, match="in_place"):
            engine.pause_generation("in-place", op_id="wrong")
    assert not engine.is_paused


def test_commands_without_an_op_id_are_each_their_own(make_engine):
    engine = make_engine()
    engine.pause_generation("in_place")
    assert engine.continue_generation().was_paused
    assert not engine.continue_generation().was_paused


# -- answered at any time, from any thread -------------------------------------------------------------


def every_command(engine: Engine) -> None:
    """Run all commands several times; each must answer, and in the end the engine is not paused."""
    for mode in MODES * 2:
        assert engine.pause_generation(mode, timeout_s=PATIENCE).mode == mode
        assert engine.abort_request("nobody", timeout_s=PATIENCE).unknown == ("nobody",)
        flush = engine.flush_cache(timeout_s=PATIENCE)
        assert flush.success or flush.error_msg
        assert engine.state()["num_blocks"] == 80
        engine.continue_generation(timeout_s=PATIENCE)


@pytest.mark.parametrize("load", ["idle", "loaded", "paused"])
def test_commands_are_answered_to_several_threads_at_once(background, load):
    callers: list[Future] = []
    if load != "idle":
        callers = [submit(background.generate, [[i, i + 1]] * 2, params(40, i)) for i in range(4)]
    if load == "paused":
        background.pause_generation("in_place", timeout_s=PATIENCE)
    for call in [submit(every_command, background) for _ in range(4)]:
        soon(call)
    background.continue_generation(timeout_s=PATIENCE)
    for caller in callers:
        for completion in soon(caller):
            assert completion.finish_reason.type in ("length", "abort")
            assert len(completion.logprobs) == len(completion.token_ids)
    wait_until(lambda: background.state()["num_running"] + background.state()["num_waiting"] == 0)
    assert_empty(background)


def test_commands_of_other_threads_are_answered_without_a_background_loop(make_engine):
    """Send commands while another thread runs the steps, which runs them, and while none does: the caller runs them."""
    engine = make_engine()
    soon(submit(every_command, engine))
    drives = submit(engine.generate, [[1, 2], [3, 4]], params(200))
    wait_until(lambda: engine.state()["num_running"] == 2)
    report = soon(submit(engine.pause_generation, "in_place"))
    assert report.num_running == 2 and not drives.done()
    forwards = engine.state()["num_forwards"]
    assert soon(submit(engine.continue_generation)).num_running == 2
    answers = soon(drives)
    assert [c.num_completion_tokens for c in answers] == [200, 200]
    assert engine.state()["num_forwards"] > forwards


def test_paused_background_engine_answers_reads_and_takes_requests(background):
    background.pause_generation("retract", timeout_s=PATIENCE)
    call = submit(background.generate, [1, 2, 3], params(5))
    wait_until(lambda: background.state()["num_waiting"] == 1)
    assert not call.done() and background.is_paused
    background.continue_generation(timeout_s=PATIENCE)
    [completion] = soon(call)
    assert completion.num_completion_tokens == 5


def test_callers_of_every_kind_get_from_the_background_loop_what_a_driver_gets(make_engine, background):
    prompts = [[i, 2 * i + 1, 7] for i in range(6)]
    expected = [make_engine().generate(p, params(12, i))[0] for i, p in enumerate(prompts)]
    calls = [submit(background.generate, p, params(12, i)) for i, p in enumerate(prompts)]
    streams = [submit(lambda p=p, i=i: list(background.stream(p, params(12, i)))) for i, p in enumerate(prompts)]

    async def all_at_once() -> list:
        return await asyncio.gather(*(background.agenerate(p, params(12, i)) for i, p in enumerate(prompts)))

    twins = soon(submit(asyncio.run, all_at_once()))
    for call, chunks, [twin], whole in zip(calls, map(soon, streams), twins, expected, strict=True):
        [answer] = soon(call)
        assert answer.token_ids == twin.token_ids == chunks[-1].completion.token_ids == whole.token_ids
        assert answer.logprobs == twin.logprobs == chunks[-1].completion.logprobs == whole.logprobs
        assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert_empty(background)


def test_start_twice_and_stop_twice_are_once(make_engine):
    engine = make_engine()
    num_threads = threading.active_count()
    engine.start()
    once = threading.active_count()
    engine.start()
    assert threading.active_count() == once > num_threads
    engine.stop()
    engine.stop()
    [completion] = engine.generate([1], params())  # the caller drives again
    assert completion.num_completion_tokens == 8
    engine.start()
    assert engine.generate([1], params())[0].token_ids == completion.token_ids
    engine.stop()
    assert_empty(engine)


def test_broken_forward_reaches_whoever_waits_and_nobody_hangs(make_engine):
    engine = make_engine()
    engine.start()
    gate = Gate(engine)
    call = submit(engine.generate, [1, 2], params(LONG))
    stream = submit(lambda: list(engine.stream([3, 4], params(LONG))))
    assert gate.entered.wait(PATIENCE)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a broken layer")

    hook = engine.model.module.model.layers[1].register_forward_hook(fail)
    gate.open()
    for caller in (call, stream):
        with pytest.raises((EngineStopped, ZeroDivisionError)) as caught:
            soon(caller)
        assert "broken layer" in f"{caught.value} {caught.value.__cause__}"
    hook.remove()
    engine.start()
    [completion] = engine.generate([1, 2], params())
    assert completion.num_completion_tokens == 8
    assert_empty(engine)


def test_a_command_that_was_interrupted_runs_again_under_its_id(make_engine, monkeypatch):
    engine = make_engine()
    drain = engine.driver._loop.drain

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.driver._loop, "drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.pause_generation("retract", op_id="a")
    monkeypatch.setattr(engine.driver._loop, "drain", drain)
    soon(submit(engine.pause_generation, "retract", op_id="a"))
    assert engine.is_paused
    engine.continue_generation()


# -- a client that goes away -----------------------------------------------------------------------


@pytest.mark.parametrize("is_paused", [False, True], ids=["running", "paused"])
def test_client_that_goes_away_aborts_its_request(background, is_paused):
    stream = background.stream([1, 2], params(LONG))
    first = next(stream)

    async def come_and_go() -> None:
        task = asyncio.create_task(background.agenerate([3, 4], params(LONG)))
        while background.state()["num_running"] + background.state()["num_waiting"] < 2:
            await asyncio.sleep(0.001)
        if is_paused:
            await asyncio.to_thread(background.pause_generation, "in_place", timeout_s=PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    soon(submit(asyncio.run, come_and_go()))
    state = background.state()
    assert [*state["running_ids"], *state["waiting_ids"]] == [first.id]
    soon(submit(stream.close))
    assert background.is_paused is is_paused
    assert background.metrics.num_aborted == 2
    background.continue_generation()
    assert_empty(background)


@pytest.mark.parametrize("after_s", [0.0, 0.05], ids=["being added", "running"])
def test_requests_of_coroutines_that_are_cancelled_twice_are_aborted(make_engine, after_s):
    # As at the end of `asyncio.run`, which cancels whatever a Ctrl-C or an error has cancelled already.
    engine = make_engine()

    async def come_and_go() -> None:
        tasks = [asyncio.create_task(engine.agenerate([3, 4], params(LONG))) for _ in range(20)]
        await asyncio.sleep(after_s)
        for _ in range(2):
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    soon(submit(asyncio.run, come_and_go()))
    assert not engine.live_sequences()
    assert_empty(engine)


def test_async_stream_that_is_left_aborts_its_request(background):
    async def leave() -> None:
        async for _ in background.astream([1, 2], params(LONG)):
            break

    soon(submit(asyncio.run, leave()))
    wait_until(lambda: background.metrics.num_aborted == 1)
    assert_empty(background)


# -- no spinning -----------------------------------------------------------------------------------


@pytest.fixture
def cpu_share() -> Callable[[], float]:
    """Return a function that measures for a second what share of one core this process uses, with all its threads.

    Those are left out that ran before the test: the loop of a process group that an earlier one left takes 0.1 %.
    """
    older = {int(tid) for tid in os.listdir("/proc/self/task")} - {threading.get_native_id()}

    def measure() -> float:
        wall, cpu, others = time.monotonic(), time.process_time(), thread_times(older)
        threading.Event().wait(1.0)
        spent = time.process_time() - cpu
        others_spent = sum(end - others[tid] for tid, end in thread_times(others).items())
        return (spent - others_spent) / (time.monotonic() - wall)

    return measure


def thread_times(tids: Iterable[int]) -> dict[int, float]:
    """Return the processor seconds of those of this process's threads that have not ended."""
    times = {}
    for tid in tids:
        with suppress(OSError):
            times[tid] = time.clock_gettime(~tid << 3 | 6)  # pthread_getcpuclockid(3), by the kernel's id
    return times


def test_idle_engine_uses_no_processor(cpu_share, background):
    background.generate([1, 2], params())
    assert cpu_share() < 0.02


def test_paused_engine_uses_no_processor_though_many_wait_for_it(cpu_share, background):
    calls = [submit(background.generate, [i], params(LONG)) for i in range(6)]
    stream = submit(lambda: list(background.stream([9], params(LONG))))

    async def waits() -> list:
        return await background.agenerate([8], params(LONG))

    twin = submit(asyncio.run, waits())
    wait_until(lambda: background.state()["num_running"] + background.state()["num_waiting"] == 8)
    background.pause_generation("in_place", timeout_s=PATIENCE)
    assert cpu_share() < 0.02
    background.pause_generation("abort", timeout_s=PATIENCE)
    for call in (*calls, twin):
        assert soon(call)[0].finish_reason.type == "abort"
    assert soon(stream)[-1].completion.finish_reason.type == "abort"


def test_caller_that_drives_a_paused_engine_uses_no_processor(cpu_share, make_engine):
    engine = make_engine()
    call = submit(engine.generate, [[1], [2]], params(LONG))
    wait_until(lambda: engine.state()["num_running"] == 2)
    engine.pause_generation("in_place")
    assert cpu_share() < 0.02
    engine.pause_generation("abort")
    assert [c.finish_reason.type for c in soon(call)] == ["abort", "abort"]


# -- two threads of commands against a loaded engine ---------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "num_commands"),
    [
        pytest.param(False, 60, id="plain"),
        pytest.param(True, 60, id="overlap"),
        pytest.param(True, 800, id="overlap-long", marks=pytest.mark.slow),
        pytest.param(False, 3000, id="plain-long", marks=pytest.mark.exhaustive),
    ],
)
def test_commands_of_two_threads_lose_no_reply_and_hang_nobody(make_engine, num_commands, overlap):
    engine = make_engine(kv_cache="24 blocks", overlap=overlap)  # 4 places, each for 5 blocks: some pressure, too
    alone = [engine.generate([i, i + 1], params(60, i))[0] for i in range(8)]
    engine.start()
    is_over = threading.Event()

    def load(index: int) -> int:
        """Return the number of answers; each equals the undisturbed answer or a beginning of it."""
        num_answers = 0
        while not is_over.is_set():
            [answer] = engine.generate([index, index + 1], params(60, index))
            num = answer.num_completion_tokens
            assert (answer.token_ids, answer.logprobs) == (alone[index].token_ids[:num], alone[index].logprobs[:num])
            assert num == 60 or answer.finish_reason.type == "abort"
            num_answers += 1
        return num_answers

    def command(seed: int) -> Counter:
        """Return the number of replies per command."""
        dice, replies = random.Random(seed), Counter()
        for _ in range(num_commands):
            verb = dice.choice(["pause", "continue", "continue", "abort", "flush", "state", "commit"])
            if verb == "pause":
                mode = dice.choice(MODES)
                assert engine.pause_generation(mode, timeout_s=PATIENCE).mode == mode
            elif verb == "continue":
                assert engine.continue_generation(timeout_s=PATIENCE).num_running <= 4
            elif verb == "abort":
                ids = [*engine.state()["running_ids"], "nobody"]
                report = engine.abort_request(dice.choice(ids), timeout_s=PATIENCE)
                assert len(report.aborted) + len(report.unknown) == 1
            elif verb == "flush":
                flush = engine.flush_cache(timeout_s=PATIENCE)
                assert flush.success is (flush.error_msg == "")
            elif verb == "state":
                assert engine.state()["num_running"] <= 4
            else:
                engine.weights.commit_weights(f"v{replies['commit']}", None)
            replies[verb] += 1
            threading.Event().wait(dice.random() * 0.01)
        return replies

    loads = [submit(load, index) for index in range(8)]
    commands = [submit(command, seed) for seed in (1, 2)]
    try:
        replies = [call.result(timeout=num_commands + PATIENCE) for call in commands]
    finally:
        is_over.set()
        engine.continue_generation(timeout_s=PATIENCE)
    assert all(call.result(timeout=PATIENCE) >= 1 for call in loads)
    engine.stop()
    assert_empty(engine)
    for counts in replies:
        assert set(counts) == {"pause", "continue", "abort", "flush", "state", "commit"}
        assert counts.total() == num_commands


def test_a_stop_before_the_thread_has_cleared_its_kick_ends_it(make_engine, monkeypatch):
    engine = make_engine()
    kicked = threading.Thread(target=engine.stop)
    was_given = threading.Event()

    class Watched(Kick):
        def give(self) -> None:
            super().give()
            was_given.set()

        def forget(self) -> None:
            if kicked.ident is None:
                kicked.start()
                assert was_given.wait(PATIENCE)
            super().forget()

    monkeypatch.setattr(driver, "Kick", Watched)
    engine.start()
    wait_until(lambda: kicked.ident is not None)
    kicked.join(PATIENCE)
    assert not kicked.is_alive()


def test_a_start_before_the_stopped_thread_has_seen_its_kick_takes_it_from_nobody(make_engine, monkeypatch):
    """Both threads had one kick: the stopped one waited for ever, or took what was meant for the other."""
    waits, may_wait = threading.Event(), threading.Event()
    first: list[threading.Thread] = []

    class Late(Kick):
        def wait(self, timeout_s: float | None) -> None:
            waits.set()
            if threading.current_thread() in first:
                assert may_wait.wait(PATIENCE)
            super().wait(timeout_s)

        def forget(self) -> None:
            super().forget()
            first[:] = first or [threading.current_thread()]
            if threading.current_thread() not in first:
                may_wait.set()

    monkeypatch.setattr(driver, "Kick", Late)
    engine = make_engine()
    engine.start()
    assert waits.wait(PATIENCE)
    stopping = submit(engine.stop)
    wait_until(lambda: not engine.is_started)
    engine.start()
    soon(stopping)
    assert engine.is_started and len(engine.generate([[1, 2]], params())) == 1
