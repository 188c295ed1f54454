"""The calls of functions that users wrote, of rewards and of environments, in one event loop for all of a job."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class UserCalls:
    """The event loop of a job's rewards and environments.

    What a user keeps in a module (a client, a semaphore, a connection) belongs to the loop that it is first used in, so
    that there is one loop from the first call to the job's end. It runs within `run` alone, in the caller's thread.
    """

    def __init__(self) -> None:
        """Start nothing: the loop is made with the first coroutine."""
        runner = self._runner = asyncio.Runner()
        self._end = weakref.finalize(self, runner.close)
        self._end.atexit = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, and return its result. Ctrl-C cancels it, and raises KeyboardInterrupt."""
        return self._runner.run(coroutine)

    def close(self) -> None:
        """Close the loop, with what still waits in it. Calling it again does nothing."""
        self._end()
