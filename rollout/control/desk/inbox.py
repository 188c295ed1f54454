"""The inbox of the loop: requests and commands that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from ...sequences.request import Request
from ..step_alarm import StepAlarm


class Inbox:
    """Hold posted requests until the loop takes them, and count the commands that wait for the current step.

    Adding never waits for a step: `lock` is held for moments only. A thread that takes both locks takes the engine's
    first.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # re-entrant only to know its holder
        self._is_owned: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # the stubs lack it
        self.is_closed = False  # then no request is posted any more
        self.alarm = StepAlarm()  # guarded by the engine's lock
        self._requests: dict[str, Request] = {}
        self._claimed: set[str] = set()  # ids of requests that are being made
        self._commands: dict[object, None] = {}  # those that wait for the engine's lock
        self.before_next: Callable[[], None] = lambda: None  # called before each step and command, with none in hand
        # Called between two steps of one schedule, as a sign of life; returns whether a thread wants the engine's lock.
        self.between_steps: Callable[[], bool] = lambda: False

    def __len__(self) -> int:
        """Return the number of requests that the loop has not taken."""
        return len(self._requests)

    def __contains__(self, id: str) -> bool:
        """Return whether a request that the loop has not taken, or that is being made, has this id."""
        return id in self._requests or id in self._claimed

    @property
    def is_locked_by_me(self) -> bool:
        """Whether this thread holds `lock`."""
        return self._is_owned()

    def close(self) -> None:
        """Take no request any more. Those that are here are still handed over."""
        with self.lock:
            self.is_closed = True

    def claim(self, ids: Iterable[str]) -> None:
        """Keep ids for requests that will be posted. The caller holds `lock` and has checked that they are free."""
        self._claimed.update(ids)

    def disclaim(self, ids: Iterable[str]) -> None:
        """Give claimed ids up. The caller holds `lock`."""
        self._claimed.difference_update(ids)

    def post(self, requests: Iterable[Request]) -> None:
        """Add requests. The caller holds `lock` and has checked that their ids are free."""
        self._requests.update((request.id, request) for request in requests)

    def take_back(self, ids: Iterable[str]) -> list[Request]:
        """Remove and return those of these requests that the loop has not taken. The caller holds the engine's lock,
        under which the loop takes them."""
        with self.lock:
            return [self._requests.pop(id) for id in ids if id in self._requests]

    def posted(self) -> list[Request]:
        """Return the requests that the loop has not taken, in order of arrival."""
        with self.lock:
            return list(self._requests.values())

    def hand_over(self, queue: Callable[[Request], None], limit: int | None = None) -> list[Request]:
        """Call `queue` with the requests, in order of arrival, and remove them, also the one at which it raises;
        returns them. limit: at most so many; None: all. The caller holds the engine's lock."""
        if not self._requests:  # asked before each step
            return []
        with self.lock:
            taken = list(islice(self._requests.values(), limit))
        num_queued = 0
        try:
            for request in taken:
                num_queued += 1
                queue(request)  # without the lock: threads that post do not wait
        finally:
            with self.lock:
                for request in taken[:num_queued]:
                    del self._requests[request.id]
        return taken

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a command while it waits for the engine's lock."""
        command = object()
        try:
            self._commands[command] = None  # in the block: an interrupt behind it leaves none counted
            yield
        finally:
            self._commands.pop(command, None)

    def is_interrupted(self, num_steps: int) -> bool:
        """Return whether a command or the alarm comes before the next step, after `num_steps` steps of this engine."""
        return bool(self._commands) or self.alarm.is_due(num_steps)

    def is_awaited(self, num_steps: int) -> bool:
        """Return whether anything comes before the next step, as `is_interrupted`, or waits for the end of this one: a
        request, or a thread that wants the engine's lock. Calls `between_steps`."""
        return self.between_steps() or bool(self._requests) or self.is_interrupted(num_steps)
