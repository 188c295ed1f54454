"""Ranks that do not come to a collective are named, and a job that is stopped as a whole and continued goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple

import pytest
from torch.distributed import TCPStore

from lockstep.integration.activity import Activity
from lockstep.integration.collective_watch import CollectiveWatch, Lags, Life
from lockstep.tests.support import prepared_python

LIMIT_S = 4
RANK = f"""
import os, sys, threading, torch, torch.distributed as dist
from lockstep.integration.ranks import process_group, this_rank

ranks = this_rank("cpu")
with process_group(ranks, {LIMIT_S}):
    print("ready", flush=True)
    for _ in range(int(os.environ.get("PIECES", "0")) * (not ranks.is_first)):
        with ranks.activity.of("writing a file"):
            threading.Event().wait(0.5)
            ranks.activity.note()
    while True:
        total = ranks.total(1.0)
        if ranks.is_first:  # the other one waits for it
            print(total, flush=True)
            if not sys.stdin.readline():
                break
"""


def sign(beat: int, begun: int, **more: object) -> dict[int, bytes]:
    return {1: json.dumps([beat, *astuple(Life(begun, **more))]).encode()}


def test_a_rank_that_does_not_come_to_a_collective_is_named_after_the_timeout():
    lags = Lags(0, 2, timeout_s=10, now=0)
    assert lags.find(Life(3), sign(1, 3), 0) is None and lags.find(Life(4), sign(2, 3), 20) is None
    assert lags.find(Life(4), sign(3, 4), 29) is None, "it has come"
    assert lags.find(Life(5), sign(4, 4), 40) is None and lags.find(Life(5), sign(5, 4), 50) is None
    failure = lags.find(Life(5), sign(6, 4), 50.5)
    assert (
        failure is not None and failure.ranks == (1,) and "rank 1 has not come to a collective for 10.5" in str(failure)
    )


def test_a_rank_is_waited_for_as_long_as_its_work_goes_on():
    lags = Lags(0, 2, timeout_s=10, now=0, setting="run.timeout_s")
    for beat in range(100):
        assert lags.find(Life(5), sign(beat, 4, doing="writing a checkpoint", progress=beat), 9 * beat) is None
    assert lags.find(Life(5), sign(100, 4, doing="writing a checkpoint", progress=99), 9 * 99 + 10) is None
    failure = lags.find(Life(5), sign(101, 4, doing="writing a checkpoint", progress=99), 9 * 99 + 10.5)
    assert str(failure) == (
        "rank 1 has not come to a collective for 10.5 s (writing a checkpoint): it hangs, is stopped, or takes longer "
        "than run.timeout_s=10 allows"
    )


def test_ranks_that_wait_in_collectives_of_different_steps_are_named():
    lags = Lags(0, 2, timeout_s=10, now=0)
    own = Life(5, step=3)
    assert lags.find(own, sign(1, 5, step=1), 1) is None and lags.find(own, sign(2, 5, step=1), 9) is None
    failure = lags.find(own, sign(3, 5, step=1), 11.5)
    assert "rank 1 is in step 1 and this one in step 3: they wait in different collectives" in str(failure)


def test_ranks_of_different_steps_whose_work_goes_on_do_not_wait():
    """One writes the checkpoint of the step before, say."""
    for whose in (0, 1):
        lags = Lags(0, 2, timeout_s=10, now=0)
        for now in range(40):
            progress = [0, 0]
            progress[whose] = now
            own = Life(5, step=3, progress=progress[0])
            assert lags.find(own, sign(now, 5, step=2, progress=progress[1]), now) is None


def test_the_activity_names_the_innermost_work_and_counts_all_of_it():
    activity, counted = Activity(), iter(range(5, 99))
    seen = [activity.progress]
    with activity.of("training"):
        with activity.of("generating", lambda: next(counted)):
            assert activity.doing == "generating"
            seen += [activity.progress, activity.progress]
        assert activity.doing == "training"
        activity.note(7)
    seen.append(activity.progress)
    assert activity.doing == "" and len(set(seen)) == 4, seen


def test_ranks_whose_collectives_have_deadlines_of_their_own_meet_before_them(monkeypatch):
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    events: list[str] = []
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(CollectiveWatch, rank, 2, 30, has_deadlines=True) for rank in range(2)]
        first, second = (one.result(30) for one in made)
        waits = threads.submit(lambda: (second.meet(), events.append("both")))
        events.append("the first comes")
        first.meet()
        waits.result(30)
        assert events == ["the first comes", "both"]
        assert not first._judges and not second._judges
        for watch in (first, second):
            watch.close()


def test_a_rank_that_is_always_seen_a_little_later_is_not_named():
    lags = Lags(0, 2, timeout_s=10, now=0)
    for now in range(100):
        assert lags.find(Life(5 * now + 5), sign(now, 5 * now), now) is None


def test_a_silent_rank_is_named_only_while_this_rank_does_not_move():
    lags = Lags(0, 2, timeout_s=10, now=0)
    for now, begun in enumerate(range(40)):  # this rank computes on; it sees what the other one said last
        assert lags.find(Life(begun), sign(1, 99), now) is None
    failure = lags.find(Life(39), sign(1, 99), 51)
    assert failure is not None and "rank 1 gives no sign of life for 51.0 s" in str(failure)


def test_a_rank_that_has_left_in_order_is_not_missed():
    lags = Lags(0, 2, timeout_s=10, now=0)
    assert lags.find(Life(3), sign(1, 3, has_left=True), 0) is None
    assert lags.find(Life(3), sign(1, 3, has_left=True), 100) is None


def test_a_rank_that_has_ended_and_comes_to_no_collective_any_more_is_named():
    lags = Lags(0, 2, timeout_s=10, now=0)
    assert lags.find(Life(3), sign(1, 3, has_left=True), 0) is None
    assert lags.find(Life(4), sign(1, 3, has_left=True), 100) is None, "it may have failed, and tell so itself"
    failure = lags.find(Life(4), sign(1, 3, has_left=True), 111)
    assert failure is not None and str(failure) == "rank 1 has ended, and comes to no collective"


@contextmanager
def two_ranks(num_pieces: int = 0) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
               "PIECES": str(num_pieces)}  # fmt: skip
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(prepared_python.Popen([sys.executable, "-c", RANK], env=env, text=True, **pipes))
    try:
        assert all(rank.stdout.readline() == "ready\n" for rank in ranks)
        assert ranks[0].stdout.readline() == "2.0\n"
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def ask(rank: subprocess.Popen[str]) -> None:
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()


@pytest.mark.slow
def test_ranks_that_are_stopped_together_go_on():
    with two_ranks() as (first, second):
        for order in ((first, second), (second, first)):
            for rank in order:
                rank.send_signal(signal.SIGSTOP)
            time.sleep(LIMIT_S + 6)  # longer than the timeout, and than what passes between two looks
            for rank in order:
                rank.send_signal(signal.SIGCONT)
            ask(first)
            assert first.stdout.readline() == "2.0\n"
        assert first.poll() is None and second.poll() is None


@pytest.mark.slow
def test_a_rank_that_writes_for_longer_than_the_timeout_is_waited_for():
    with two_ranks(num_pieces=LIMIT_S * 3) as (first, second):
        ask(first)
        assert first.stdout.readline() == "2.0\n"
        assert first.poll() is None and second.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_alone_is_named_by_the_other(stopped):
    with two_ranks() as ranks:
        lost, left = ranks[stopped], ranks[1 - stopped]
        lost.send_signal(signal.SIGSTOP)
        if stopped == 1:  # which may have sent its part of the next collective, and none of the one behind it
            ask(left)
            ask(left)
        with suppress(BrokenPipeError):
            _, said = left.communicate(timeout=60)
        assert (
            left.returncode == 1 and f"lockstep: error: rank {1 - stopped} stops in a collective of the job: " in said
        )
        assert ("rank 1 has not come to" if stopped else "rank 0 is stopped, or its machine is gone") in said, said
