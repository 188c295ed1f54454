"""Requests and commands that wait for the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ..sequences.request import Request
from .step_alarm import StepAlarm


class Inbox:
    """Holds posted requests until the loop takes them, and says whether a command waits for the step under way.

    Adding never waits for a step: `lock` is held for moments only. It is taken after the engine's lock, never before.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.alarm = StepAlarm()  # guarded by the engine's lock
        self._requests: dict[str, Request] = {}
        self._num_commands = 0  # that wait for the engine's lock

    def __len__(self) -> int:
        """How many requests wait to be taken."""
        return len(self._requests)

    def __contains__(self, id: str) -> bool:
        return id in self._requests

    def post(self, requests: Iterable[Request]) -> None:
        """Add requests. The caller holds `lock`, and has seen that their ids are free."""
        self._requests.update((request.id, request) for request in requests)

    def hand_over(self, queue: Callable[[Request], None]) -> None:
        """Call `queue` with each request, in order of arrival, and forget them."""
        with self.lock:
            for request in self._requests.values():
                queue(request)
            self._requests.clear()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a command that waits for the engine's lock."""
        with self.lock:
            self._num_commands += 1
        try:
            yield
        finally:
            with self.lock:
                self._num_commands -= 1

    def is_interrupted(self, num_steps: int) -> bool:
        """Whether a command or the alarm comes before the next step, after `num_steps` since the engine was made."""
        return self._num_commands > 0 or self.alarm.is_due(num_steps)
