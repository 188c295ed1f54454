"""The calls of functions that users wrote, of rewards and of environments.

A job has one event loop for all of them. An error says which call has raised it, a warning which one takes long, and
those that are coroutines may have a limit of time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class CallTimedOut(Exception):
    """A call that has taken longer than `rollout.reward_timeout_s`. The message names the function, its note the
    sample."""


class UserCalls:
    """The event loop of a job's rewards and environments, and how long one call may take.

    What a user keeps in a module (a client, a semaphore, a connection) belongs to the loop that it is first used in, so
    that there is one loop from the first call to the job's end. It runs within `run` alone, in the caller's thread.
    """

    def __init__(self, timeout_s: float = 0.0, *, patience_s: float = 60.0) -> None:
        """Start nothing: the loop is made with the first coroutine. timeout_s: of one call of a coroutine function; 0:
        no limit. patience_s: seconds until a warning names calls."""
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self.num_over = 0  # calls so far
        self._runner = asyncio.Runner()
        self._limits: dict[object, float] = {}  # ends, on the monotonic clock, of waits that have one

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, and return its result. Ctrl-C cancels it, and raises KeyboardInterrupt."""
        return self._runner.run(coroutine)

    @contextmanager
    def waits(self, limit_s: float) -> Iterator[None]:
        """Enclose a wait that ends in so many seconds at the latest, so that the other ranks need not fear for it."""
        key = object()
        self._limits[key] = time.monotonic() + limit_s
        try:
            yield
        finally:
            del self._limits[key]

    @property
    def progress(self) -> int:
        """A number that grows with each call that is over, and while some wait has not come to its limit. Another
        thread may ask."""
        now = time.monotonic()
        return self.num_over + (int(now) if any(end > now for end in list(self._limits.values())) else 0)

    def close(self) -> None:
        """Close the loop, with what still waits in it. Calling it again does nothing."""
        self._runner.close()


class UserFunction:
    """One function of a user, and its calls that are under way."""

    def __init__(self, name: str, gives: str, calls: UserCalls) -> None:
        """Begin without calls. name: of the function, as errors have it; gives: what it must return, likewise; calls:
        of the job."""
        self.name, self._gives, self._calls = name, gives, calls
        self._open: dict[object, tuple[Callable[[], str], float]] = {}  # names of calls, and when they began; in order
        self._num_over = 0  # calls of the batch
        self._longest_s = 0.0  # of the batches before

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """See `UserCalls.run`."""
        return self._calls.run(coroutine)

    def waits(self, limit_s: float) -> AbstractContextManager[None]:
        """See `UserCalls.waits`."""
        return self._calls.waits(limit_s)

    @contextmanager
    def batch(self, num_calls: int) -> Iterator[None]:
        """Enclose calls. Where they take long, a warning of the log says how many are over and names the oldest of the
        others: after a minute, but not before twice the time of the longest batch so far, and again when the time has
        doubled. Another thread writes it, as a function may block this one."""
        self._num_over = 0
        wait_s = max(self._calls.patience_s, 2 * self._longest_s)
        began, ended = time.monotonic(), threading.Event()
        watch = threading.Thread(
            target=self._watch, args=(num_calls, wait_s, began, ended), name="lockstep-user-calls", daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()
            self._longest_s = max(self._longest_s, time.monotonic() - began)

    @contextmanager
    def call(self, what: Callable[[], str]) -> Iterator[None]:
        """Enclose one call. what: names it. An error gets a note of both names; a SystemExit, which would end the job
        without a word, becomes a ValueError."""
        key = object()
        self._open[key] = what, time.monotonic()
        try:
            yield
        except SystemExit as error:
            found = ValueError(f"{self.name} ends the program (exit code {error.code}): it must return {self._gives}")
            found.add_note(self._note(what))
            raise found from error
        except Exception as error:
            error.add_note(self._note(what))
            raise
        finally:
            del self._open[key]
            self._num_over += 1
            self._calls.num_over += 1

    async def awaited(self, function: Callable[[], Awaitable[T]], what: Callable[[], str]) -> T:
        """Call a coroutine function; see `call`. Raises CallTimedOut where it takes longer than the job allows, and
        ValueError where a task that it waits for was cancelled: a CancelledError of this task would end the job without
        a word."""
        limit_s = self._calls.timeout_s
        with self.call(what), self._calls.waits(limit_s):
            try:
                async with asyncio.timeout(limit_s or None) as limit:
                    return await function()
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                raise ValueError(f"{self.name} waits for a task that was cancelled, and does not handle it") from error
            except TimeoutError as error:
                if not limit.expired():  # one of the function's own
                    raise
                raise CallTimedOut(
                    f"{self.name} has returned nothing for {limit_s:g} s, which is rollout.reward_timeout_s"
                ) from error

    def _note(self, what: Callable[[], str]) -> str:
        return f"in {self.name}, {what()}"

    def _watch(self, num_calls: int, wait_s: float, began: float, ended: threading.Event) -> None:
        while not ended.wait(wait_s):
            wait_s = (now := time.monotonic()) - began
            oldest = list(self._open.values())[:1]
            others = [f"; the oldest of the others, {what()}, for {now - since:.0f} s" for what, since in oldest]
            logger.warning(
                "%s has run for %.0f s: %d of %d calls are over%s", self.name, wait_s, self._num_over, num_calls,
                "".join(others),
            )  # fmt: skip
