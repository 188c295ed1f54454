"""Seconds in which this process ran. A process that was stopped as a whole (SIGSTOP, a suspended SLURM job, a frozen
container) and continued has not waited meanwhile: deadlines by this clock go on where they were.

A thread looks at the time each second. Where far more has passed between two looks, the process did not run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_LOOK_S = 1.0
_GAP_S = 5.0  # between two looks: a busy machine and calls that hold the interpreter explain less


class RunningClock:
    """A clock that leaves gaps between its looks out. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at the time of `clock`, in seconds."""
        self._clock, self._lock = clock, threading.Lock()
        self._last, self._stopped_s = clock(), 0.0

    def now(self) -> float:
        """Look at the time. Returns the seconds of `clock` without its gaps."""
        with self._lock:
            now = self._clock()
            if (passed := now - self._last) > _GAP_S:
                self._stopped_s += passed - _LOOK_S
            self._last = now
            return now - self._stopped_s


class _OfProcess:
    """The clock of this process, and the thread that looks at it."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # a child has no threads of its parent

    def _begin(self) -> None:
        self.clock, self._thread, self._starting = RunningClock(), None, threading.Lock()

    _thread: threading.Thread | None

    def now(self) -> float:
        """Look at the clock, whose thread is started before."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._look, name="lockstep-clock", daemon=True)
                    self._thread.start()
        return self.clock.now()

    def _look(self) -> None:
        never = threading.Event()
        while not never.wait(_LOOK_S):
            self.clock.now()


_OURS = _OfProcess()


def running_time() -> float:
    """Return the seconds in which this process ran, from an arbitrary beginning."""
    return _OURS.now()
