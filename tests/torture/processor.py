"""The processor time that other processes took from a server, so that its latency is its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
NUM_CORES = os.cpu_count() or 1
_NOT_BUSY = (
    3,
    4,
    8,
    9,
)  # fields of /proc/stat: idle, waiting for a disk, guests (which other fields have)


@dataclass(frozen=True)
class Reading:
    """The counters of a process and of the machine at one time. Differences of two readings have a meaning."""

    at: float  # of time.monotonic()
    waited_s: dict[int, float]  # of each thread of the process: runnable, but without a processor
    own_s: float  # processor time of the process and its descendants
    busy_s: float  # processor time of everything on the machine


def read(pid: int) -> Reading:
    """Read the counters of a process. Raises OSError where it has ended."""
    processes = [pid, *descendants(pid)]
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    busy_s = sum(x for index, x in enumerate(fields) if index not in _NOT_BUSY) * _TICK_S
    return Reading(time.monotonic(), _waited_s(pid), sum(_used_s(one) for one in processes), busy_s)


def taken_s(before: Reading, after: Reading) -> float:
    """Return for how long at most other processes kept the process from running between two readings.

    Two bounds hold, and the smaller one is returned. The process cannot have been kept for longer than its threads
    waited for a processor; a thread that holds a lock for long and runs, or that sleeps, waits for none. And without
    the others all its work would have been done faster by no more than their share of the machine.
    """
    waited_s = sum(max(0.0, s - before.waited_s.get(thread, 0.0)) for thread, s in after.waited_s.items())
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, min(waited_s, others_s / NUM_CORES))


def descendants(pid: int) -> list[int]:
    """List the processes that a process has started, and theirs."""
    found, todo = [], [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found += children
            todo += children
    return found


def _waited_s(pid: int) -> dict[int, float]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except OSError:  # this thread has ended
            continue
    return found


def _used_s(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended; 0 where it has ended itself."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * _TICK_S
