"""The step that coroutines wait for together, and the rollout phase that they keep open between two of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ..model.rollout_phase import RolloutPhase
from .fair_lock import FairLock
from .own_process import OwnProcess


class SharedStep:
    """Run one step at a time in a thread of its own, while coroutines ask for one; otherwise each would wait for the
    steps of all others."""

    def __init__(self, run: Callable[[], None]) -> None:
        """Create it. run: runs one step."""
        self._run = run
        self._thread = ThreadPoolExecutor(1, "lockstep-step")  # begins with the first step
        self._newest: Future[None] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def join(self) -> Future[None] | None:
        """Return the running step, or begin one. Returns None once it is closed."""
        with self._lock:
            if self._is_closed:
                return None
            if self._newest is None or self._newest.done():
                self._newest = self._thread.submit(self._run)
            return self._newest

    def close(self) -> None:
        """Wait for the end of the running step. None runs afterwards."""
        with self._lock:
            self._is_closed = True
        self._thread.shutdown()


class KeptPhase:
    """The rollout phase that calls of coroutines keep open from one of their steps to the next: to begin one costs more
    than a step of a small model.

    A command ends it, and so does the start of a thread that runs the steps: then the module is the trainer's, as it is
    between the steps of a stream. The next step of the coroutines begins it again, which waits for the end of a pause.
    """

    def __init__(self, lock: FairLock, phase: RolloutPhase, process: OwnProcess) -> None:
        """Create it, with no phase. lock: the engine's."""
        self._lock, self._phase, self._process = lock, phase, process
        self._calls: dict[Callable[[], None], None] = {}  # by their ends
        self._is_kept = False  # guarded by the lock

    def until(self, let_go: Callable[[], None]) -> Callable[[], None]:
        """Count a call that keeps the phase; returns its end, which calls `let_go` first. The last one ends the phase,
        and waits for the engine's lock."""

        def end() -> None:
            try:
                let_go()
            finally:
                self._calls.pop(end, None)
                if not self._calls and not self._process.is_forked:
                    with self._lock:
                        self.end()

        self._calls[end] = None
        return end

    def keep(self) -> None:
        """Begin the phase where a call keeps it. The caller holds the lock, and runs a step next. Raises the errors of
        a phase that begins."""
        if self._calls and not self._is_kept:
            self._phase.enter(admits=False)  # a borrower would need the lock for its work
            self._is_kept = True

    def end(self) -> None:
        """Give the module back if it is kept. The caller holds the lock."""
        if self._is_kept:
            self._is_kept = False
            self._phase.leave(admits=False)
