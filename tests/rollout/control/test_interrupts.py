"""Interrupts of the main thread, such as Ctrl-C: none loses a lock, half of a step, or an answer."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType, SimpleNamespace

import pytest

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.control.fair_lock import FairLock
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=40, sampling_seed=5, ignore_eos=True)
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Let SIGUSR1 raise KeyboardInterrupt, as Ctrl-C does."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGUSR1)


def is_free(lock: FairLock) -> bool:
    """Ask in another thread."""
    with ThreadPoolExecutor(1) as other:
        if other.submit(lock.acquire, timeout=5).result(PATIENCE):
            other.submit(lock.release).result(PATIENCE)
            return True
    return False


def test_an_interrupt_waits_until_the_lock_is_released():
    lock, did = FairLock(), []

    def run() -> None:
        with lock:
            with lock:
                interrupt()
                did.append("inner")
            did.append("outer")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert did == ["inner", "outer"] and is_free(lock)
    assert signal.getsignal(signal.SIGUSR1) is signal.default_int_handler


def test_the_second_interrupt_does_not_wait():
    lock, did = FairLock(), []

    def run() -> None:
        with lock:
            interrupt()
            did.append("after the first")
            interrupt()
            did.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert did == ["after the first"] and is_free(lock)


def test_an_interrupt_is_raised_inside_where_the_holder_asks_for_it():
    lock = FairLock()
    with lock:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            lock.call_handlers()
        lock.call_handlers()
    assert is_free(lock)


def test_a_handler_that_is_set_inside_stays_and_one_that_raises_nothing_is_called_once():
    lock, came = FairLock(), []

    def other(number: int, frame: FrameType | None) -> None:
        came.append(number)

    with lock:
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other
    with lock:
        interrupt()
        assert not came
    assert came == [signal.SIGUSR1] and is_free(lock)


def test_two_locks_keep_one_interrupt():
    a, b = FairLock(), FairLock()

    def run() -> None:
        with a:
            with b:
                interrupt()
            assert is_free(b)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert is_free(a) and signal.getsignal(signal.SIGUSR1) is signal.default_int_handler


def test_locks_that_end_in_another_order_than_they_began_keep_one_interrupt():
    a, b = FairLock(), FairLock()

    def run() -> None:
        a.acquire()
        b.acquire()
        a.release()
        with a:
            interrupt()
            did.append("inner")
        did.append("outer")
        b.release()

    for _ in range(2):
        did: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            run()
        assert did == ["inner", "outer"]
    assert is_free(a) and is_free(b) and signal.getsignal(signal.SIGUSR1) is signal.default_int_handler


def test_a_handler_set_inside_that_hands_on_to_the_one_before_is_called_once():
    lock, came = FairLock(), []
    with lock:
        before = signal.getsignal(signal.SIGUSR1)
        assert callable(before)

        def other(number: int, frame: FrameType | None) -> None:
            came.append(number)
            before(number, frame)

        signal.signal(signal.SIGUSR1, other)

    def run() -> None:
        with lock:
            interrupt()
            assert not came

    with pytest.raises(KeyboardInterrupt):
        run()
    assert came == [signal.SIGUSR1] and is_free(lock) and signal.getsignal(signal.SIGUSR1) is other


def test_a_handler_that_takes_the_lock_leaves_a_wait_for_it_as_it_was():
    lock, did, held, may_end = FairLock(), [], threading.Event(), threading.Event()

    def other(number: int, frame: FrameType | None) -> None:
        if "first" in did:
            raise KeyboardInterrupt
        did.append("first")
        may_end.set()
        with lock:
            pass

    def hold() -> None:
        with lock:
            held.set()
            while not lock.is_wanted():
                pass
            for _ in range(60):  # where the main thread was about to wait Python notices a signal only after the wait
                os.kill(os.getpid(), signal.SIGUSR1)
                if may_end.wait(1):
                    break

    def run() -> None:
        with lock:
            interrupt()
            did.append("second")

    signal.signal(signal.SIGUSR1, other)
    with ThreadPoolExecutor(1) as thread:
        holder = thread.submit(hold)
        assert held.wait(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            run()
        holder.result(PATIENCE)
    assert did == ["first", "second"] and is_free(lock)


@contextmanager
def interrupted_soon(when: threading.Event) -> Iterator[None]:
    """Interrupt the main thread from another one, once `when` is set; again if it was about to wait at that moment,
    where Python notices a signal only after the wait."""
    came = threading.Event()

    def run() -> None:
        assert when.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not came.wait(1):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        came.set()
        thread.join(PATIENCE)


def test_a_wait_for_the_lock_is_interrupted_at_once():
    lock, waits, may_end = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            while not lock.is_wanted():
                pass
            waits.set()
            assert may_end.wait(PATIENCE)

    held = threading.Event()
    with ThreadPoolExecutor(1) as other:
        holder = other.submit(hold)
        assert held.wait(PATIENCE)
        with pytest.raises(KeyboardInterrupt), interrupted_soon(waits), lock:
            pass
        may_end.set()
        holder.result(PATIENCE)
    assert is_free(lock)


def test_a_wait_for_others_in_a_block_is_interrupted_and_the_block_has_the_lock_again():
    lock, lent = FairLock(), threading.Event()
    woken = threading.Lock()
    woken.acquire()

    def take() -> None:
        with lock:
            lent.set()

    with ThreadPoolExecutor(1) as other, lock, lock:
        taken = other.submit(take)
        with pytest.raises(KeyboardInterrupt), interrupted_soon(lent):
            lock.wait(woken)
        taken.result(PATIENCE)
        assert not other.submit(lock.acquire, timeout=0.01).result(PATIENCE)
    assert is_free(lock)


def test_an_interrupt_of_a_step_leaves_its_answers_for_the_next_call(make_model):
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="64 blocks", max_num_seqs=4))
    ids = [id for index in range(3) for id in engine.add([1, 2, index], PARAMS)]
    commit, answers, num_steps = engine.parts.scheduler.on_step_completed, [], 0

    def interrupted(*args: object) -> None:
        interrupt()
        commit(*args)

    engine.parts.scheduler.on_step_completed = interrupted
    while engine.has_work:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        num_steps += 1
    engine.parts.scheduler.on_step_completed = commit
    answers = engine.step()
    assert {answer.id for answer in answers} == set(ids) and num_steps >= 40
    assert [answer.token_ids for answer in sorted(answers, key=lambda a: ids.index(a.id))] == [
        answer.token_ids for answer in engine.generate([[1, 2, index] for index in range(3)], PARAMS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["the caller", "the caller, beside reports", "a thread"])
def test_interrupts_at_any_moment_lose_no_lock_and_change_no_answer(make_model, who):
    """Who runs the steps. Each call begins and ends a rollout phase of the module."""
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="64 blocks", max_num_seqs=4))
    params = dataclasses.replace(PARAMS, max_new_tokens=8)
    draw, expected = random.Random(7), engine.generate([[1, 2, 3]], params)[0]
    # Plain attributes: a main thread that is interrupted inside `Event.set` leaves the event locked.
    now = SimpleNamespace(takes_one=False, is_over=False, num_chunks=0)

    def generate() -> None:
        """Stream until an interrupt comes: there is one at a time, since a second one would not wait for the lock."""
        now.takes_one = True
        while True:
            with engine.model.rollout_phase():  # which a thread's steps wait for
                for chunk in engine.stream([1, 2, 3], params):
                    now.num_chunks += 1
                    if chunk.completion is not None:
                        assert chunk.completion.token_ids == expected.token_ids

    def send() -> None:
        moment, sent = 0, time.monotonic()  # a number of chunks; when the newest interrupt was sent
        while not now.is_over:
            time.sleep(draw.uniform(0.0001, 0.003))
            is_lost = time.monotonic() - sent > 30  # in a callback of the garbage collector, or a finaliser
            if (now.takes_one and now.num_chunks >= moment) or is_lost:
                now.takes_one, moment, sent = False, now.num_chunks + draw.randrange(12), time.monotonic()
                os.kill(os.getpid(), signal.SIGUSR1)

    def report() -> None:
        while not now.is_over:
            time.sleep(0.002)  # leave the lock to others
            engine.state()

    threads = [threading.Thread(target=send)]
    if who == "a thread":
        engine.start()
    if "reports" in who:
        threads.append(threading.Thread(target=report))
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            with pytest.raises(KeyboardInterrupt):
                generate()
    finally:
        now.is_over = True
        for thread in threads:
            thread.join(PATIENCE)
    assert now.num_chunks > 60
    again = engine.generate([[1, 2, 3]], params)[0]
    assert (again.token_ids, again.logprobs, again.text) == (expected.token_ids, expected.logprobs, expected.text)
    state = engine.state()
    assert state["num_running"] == state["num_waiting"] == 0 and is_free(engine.driver.lock)
    assert not engine.driver.inbox.is_interrupted(0)
    engine.close()


class InterruptedAt:
    """A trace function that interrupts at one call of the desk's functions, counted from 0, until the requests have
    ended: the desk lets go of them then."""

    def __init__(self, number: int) -> None:
        self.num_left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and f"control{os.sep}desk" in frame.f_code.co_filename:
            if frame.f_code.co_name == "let_go":
                sys.settrace(None)
                return
            self.num_left -= 1
            if self.num_left == -1:
                sys.settrace(None)
                interrupt()


@pytest.mark.parametrize("what", ["generate", "stream", "add"])
def test_an_interrupt_while_requests_are_queued_leaves_none_of_them(make_model, what):
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="64 blocks", max_num_seqs=4))
    prompts, params = [[1, 2, 3], [4, 5, 6, 7]], SamplingParams(max_new_tokens=2, sampling_seed=5)
    calls = {
        "generate": lambda: engine.generate(prompts, params),
        "stream": lambda: list(engine.stream(prompts[0], params)),
        "add": lambda: engine.add(prompts[0], params, rid="r"),
    }
    calls["generate"]()
    for number in range(400):
        trace = InterruptedAt(number)
        try:
            sys.settrace(trace)
            calls[what]()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if trace.num_left >= 0:
            break
        assert not engine.requests._inbox._claimed, number
        if what != "add":
            assert len(engine.mailboxes) == 0 and not engine.has_work, number
        engine.abort_request(abort_all=True)  # `add` may have queued its own before the interrupt was raised
    assert 10 < number < 400, "all calls were interrupted"
    engine.close()
