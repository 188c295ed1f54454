"""Tests of the threads behind the event loop: it never waits until one has started, and no call is lost."""

from __future__ import annotations

import _thread
import asyncio
import gc
import sys
import threading
import time

import pytest

from lockstep.integration.http.edge import threads as module
from lockstep.integration.http.edge.threads import Threads, run_giving_way, start_pool
from lockstep.rollout import giving_way
from lockstep.rollout.giving_way import give_way

PATIENCE = 10


def test_a_thread_that_dies_while_it_starts_holds_neither_the_event_loop_nor_a_call(monkeypatch):
    threads, hold = Threads(4), threading.Event()

    async def scenario() -> list[int]:
        first = asyncio.ensure_future(threads.run(lambda: hold.wait(PATIENCE)))
        until_runs = asyncio.ensure_future(threads.run(lambda: 1))  # has a thread of its own
        assert await until_runs == 1
        monkeypatch.setattr(threading.Thread, "_bootstrap", lambda self: None)
        monkeypatch.setattr(module._thread, "start_new_thread", lambda call, args: started.append(call))
        calls = [asyncio.ensure_future(threads.run(lambda i=i: i)) for i in range(6)]
        answers = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
        hold.set()
        assert await first
        return answers

    started, answers = [], []
    runner = threading.Thread(target=lambda: answers.extend(asyncio.run(scenario())), daemon=True)
    runner.start()
    runner.join(2 * PATIENCE)
    assert answers == list(range(6)), "the event loop stands"
    assert started


def test_a_call_waits_for_a_free_thread_where_the_system_allows_no_further_one(monkeypatch, caplog):
    threads, hold = Threads(4), threading.Event()

    def refuse(call, args):
        raise RuntimeError("can't start new thread")

    async def scenario() -> object:
        first = asyncio.ensure_future(threads.run(lambda: hold.wait(PATIENCE)))
        second = asyncio.ensure_future(threads.run(lambda: 2))
        await asyncio.sleep(0)
        hold.set()
        return await asyncio.wait_for(asyncio.gather(first, second), PATIENCE)

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert asyncio.run(scenario()) == [True, 2]
    assert "no further thread could be started: " in caplog.text


def test_a_thread_that_dies_for_lack_of_memory_gives_its_place_to_another(monkeypatch):
    threads, hold, deaths = Threads(2), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda args: None)
    known = threading.current_thread

    def name_it() -> threading.Thread:
        if not deaths and sys._getframe(1).f_code is module._Queue.work.__code__:  # a thread that is to take a name
            deaths.append(1)
            raise MemoryError
        return known()

    async def scenario() -> list[object]:
        while not threads._queue._num_free:
            await asyncio.sleep(0.001)
        first = asyncio.ensure_future(threads.run(lambda: hold.wait(3 * PATIENCE)))
        while threads._queue._num_free:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(module.threading, "current_thread", name_it)
        calls = [asyncio.ensure_future(threads.run(lambda: 1))]
        while not deaths:
            await asyncio.sleep(0.001)
        calls.append(asyncio.ensure_future(threads.run(lambda: 2)))  # the first holds the other place
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
        finally:
            hold.set()
            await first

    assert asyncio.run(scenario()) == [1, 2]
    assert deaths


def test_at_most_the_limit_runs_at_a_time_and_a_cancelled_call_that_waits_never_runs():
    threads, hold, running, ran = Threads(3), threading.Event(), [], []

    def call(index: int) -> None:
        running.append(index)
        hold.wait(PATIENCE)

    async def scenario() -> None:
        calls = [asyncio.ensure_future(threads.run(lambda i=i: call(i))) for i in range(3)]
        while len(running) < 3:
            await asyncio.sleep(0.001)
        late = [asyncio.ensure_future(threads.run(lambda i=i: ran.append(i))) for i in range(8)]
        await asyncio.sleep(0)
        late[2].cancel()
        await asyncio.sleep(0)
        assert not ran
        hold.set()
        await asyncio.gather(*calls, *late, return_exceptions=True)

    asyncio.run(scenario())
    assert sorted(ran) == [0, 1, 3, 4, 5, 6, 7]


def test_the_errors_of_a_call_are_its_callers():
    threads = Threads(1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(threads.run(lambda: 1 // 0))
    assert asyncio.run(threads.run(lambda: 3)) == 3


def test_threads_end_when_there_is_little_to_do_and_with_their_owner(monkeypatch, until):
    def living() -> int:
        return sum(
            thread.name == "of-this-test" and thread.ident in sys._current_frames() for thread in threading.enumerate()
        )

    monkeypatch.setattr(module, "_KEPT_S", 0.05)
    threads, hold = Threads(8, "of-this-test"), threading.Event()

    async def scenario(threads: Threads) -> None:
        calls = [asyncio.ensure_future(threads.run(lambda: hold.wait(PATIENCE))) for _ in range(8)]
        while living() < 8:
            await asyncio.sleep(0.001)
        hold.set()
        await asyncio.gather(*calls)

    asyncio.run(scenario(threads))
    until(lambda: living() == 1)
    assert asyncio.run(threads.run(lambda: 1)) == 1
    del threads
    gc.collect()
    until(lambda: living() == 0)


def test_a_pool_runs_all_its_threads_at_once():
    before = time.monotonic()
    pool = start_pool(3, "all-of-them")
    assert sum(thread.name.startswith("all-of-them") for thread in threading.enumerate()) == 3
    assert pool.submit(lambda: 5).result(PATIENCE) == 5
    pool.shutdown()
    assert time.monotonic() - before < PATIENCE


def test_a_pool_whose_threads_do_not_start_says_so(monkeypatch):
    monkeypatch.setattr(module, "_START_S", 0.1)
    monkeypatch.setattr(module.ThreadPoolExecutor, "submit", lambda self, *call: None)
    with pytest.raises(TimeoutError, match=r"the threads dead-ones did not start within 0\.1 s"):
        start_pool(2, "dead-ones")


def test_a_thread_that_gives_way_computes_a_slice_while_the_event_loop_runs_all_that_is_ready(monkeypatch):
    """A document is parsed: without giving way the thread goes on while the event loop has work."""
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", PATIENCE)
    monkeypatch.setattr(giving_way, "_SLICE_S", 0.0)
    pool, gone_on = start_pool(1, "parser"), []

    def compute() -> int:
        for index in range(20):
            gone_on.append(index)
            give_way()
        return len(gone_on)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        seen = []
        computing = loop.run_in_executor(pool, run_giving_way, loop, compute)
        while not gone_on:
            await asyncio.sleep(0)
        for _ in range(5):
            first = len(gone_on)
            busy_until = time.monotonic() + 0.02
            while time.monotonic() < busy_until:  # one pass of the event loop, in which system calls give the lock up
                time.sleep(0)
            seen.append(len(gone_on) - first)
            await asyncio.sleep(0.001)
        assert max(seen) <= 1
        assert await computing == 20

    asyncio.run(scenario())
    pool.shutdown()


def test_a_busy_event_loop_delays_a_thread_that_gives_way_no_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(giving_way, "_SLICE_S", 0.0)
    pool, gone_on = start_pool(1, "parser"), threading.Event()

    def compute() -> None:
        give_way()
        gone_on.set()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        computing = loop.run_in_executor(pool, run_giving_way, loop, compute)
        assert gone_on.wait(PATIENCE)  # the event loop stands meanwhile
        await computing

    asyncio.run(scenario())
    pool.shutdown()


def test_nothing_gives_way_elsewhere_or_to_a_loop_that_has_ended():
    began = time.monotonic()
    for _ in range(1000):
        give_way()
    loop = asyncio.new_event_loop()
    loop.close()

    def compute() -> int:
        until = time.monotonic() + 0.01
        while time.monotonic() < until:
            give_way()
        return 3

    assert run_giving_way(loop, compute) == 3
    assert time.monotonic() - began < PATIENCE
