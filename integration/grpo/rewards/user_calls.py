"""The calls of functions that users wrote, of rewards and of environments: one event loop for all of a job, and errors
that say which call raised them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
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


class UserFunction:
    """One function of a user, for its errors."""

    def __init__(self, name: str, gives: str) -> None:
        """name: of the function, as errors have it, gives: what it must return, likewise."""
        self.name, self._gives = name, gives

    @contextmanager
    def call(self, what: Callable[[], str]) -> Iterator[None]:
        """Enclose one call. what: names it. An error gets a note of both names; a SystemExit, which would end the job
        without a word, becomes a ValueError."""
        try:
            yield
        except SystemExit as error:
            found = ValueError(f"{self.name} ends the program (exit code {error.code}): it must return {self._gives}")
            found.add_note(self._note(what))
            raise found from error
        except Exception as error:
            error.add_note(self._note(what))
            raise

    async def awaited(self, function: Callable[[], Awaitable[T]], what: Callable[[], str]) -> T:
        """Call a coroutine function; see `call`."""
        with self.call(what):
            return await function()

    def _note(self, what: Callable[[], str]) -> str:
        return f"in {self.name}, {what()}"
