"""A clock of the time in which a process ran: a stop of the whole process is no part of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lockstep.kernels.machine.running_time import RunningClock

WATCHED = """
import sys, time
from lockstep.kernels.machine.running_time import running_time
began = time.monotonic(), running_time()
print("ready", flush=True)
sys.stdin.readline()
print(time.monotonic() - began[0], running_time() - began[1], flush=True)
"""


def test_what_passes_between_two_looks_counts_and_a_stop_does_not():
    times = iter([100.0, 101.0, 105.5, 4105.5, 4106.5])
    clock = RunningClock(lambda: next(times))
    assert [clock.now() for _ in range(4)] == [101.0, 105.5, 106.5, 107.5]


def test_a_stopped_process_does_not_age():
    child = subprocess.Popen([sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(7)  # of the stop that is measured
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        passed, ran = map(float, child.stdout.readline().split())
    finally:
        child.kill()
        child.wait()
    assert passed > 7 and ran < passed - 5


@pytest.mark.parametrize("num_looks", [1, 5])
def test_a_forked_process_has_a_clock_of_its_own(num_looks):
    from lockstep.kernels.machine.running_time import running_time

    running_time()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        looks = [running_time() for _ in range(num_looks)]
        os.write(write, b"y" if looks == sorted(looks) else b"n")
        os._exit(0)
    assert os.read(read, 1) == b"y" and os.waitpid(pid, 0)[1] == 0
