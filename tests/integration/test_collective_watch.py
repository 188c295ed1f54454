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
from contextlib import contextmanager, suppress

import pytest

from lockstep.integration.collective_watch import Lags
from lockstep.tests.support import prepared_python

LIMIT_S = 4
RANK = f"""
import sys, torch, torch.distributed as dist
from lockstep.integration.ranks import process_group, this_rank

ranks = this_rank("cpu")
with process_group(ranks, {LIMIT_S}):
    print("ready", flush=True)
    while True:
        total = ranks.total(1.0)
        if ranks.is_first:  # the other one waits for it
            print(total, flush=True)
            if not sys.stdin.readline():
                break
"""


def sign(beat: int, begun: int, *, has_left: bool = False) -> dict[int, bytes]:
    return {1: json.dumps([beat, begun, has_left]).encode()}


def test_a_rank_that_does_not_come_to_a_collective_is_named_after_the_timeout():
    lags = Lags(0, 2, timeout_s=10, now=0)
    assert lags.find(3, sign(1, 3), 0) is None and lags.find(4, sign(2, 3), 20) is None
    assert lags.find(4, sign(3, 4), 29) is None, "it has come"
    assert lags.find(5, sign(4, 4), 40) is None and lags.find(5, sign(5, 4), 50) is None
    failure = lags.find(5, sign(6, 4), 50.5)
    assert (
        failure is not None and failure.ranks == (1,) and "rank 1 has not come to a collective for 10.5" in str(failure)
    )


def test_a_rank_that_is_always_seen_a_little_later_is_not_named():
    lags = Lags(0, 2, timeout_s=10, now=0)
    for now in range(100):
        assert lags.find(5 * now + 5, sign(now, 5 * now), now) is None


def test_a_silent_rank_is_named_only_while_this_rank_does_not_move():
    lags = Lags(0, 2, timeout_s=10, now=0)
    for now, begun in enumerate(range(40)):  # this rank computes on; it sees what the other one said last
        assert lags.find(begun, sign(1, 99), now) is None
    failure = lags.find(39, sign(1, 99), 51)
    assert failure is not None and "rank 1 gives no sign of life for 51.0 s" in str(failure)


def test_a_rank_that_has_left_in_order_is_not_missed():
    lags = Lags(0, 2, timeout_s=10, now=0)
    assert lags.find(3, sign(1, 3, has_left=True), 0) is None
    assert lags.find(4, sign(1, 3, has_left=True), 100) is None


@contextmanager
def two_ranks() -> Iterator[list[subprocess.Popen[str]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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
