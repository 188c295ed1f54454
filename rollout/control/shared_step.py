"""The step that coroutines wait for together; otherwise each would wait for the steps of all others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class SharedStep:
    """Run one step at a time in a thread of its own, while coroutines ask for one."""

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
