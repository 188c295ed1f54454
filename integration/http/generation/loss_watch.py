"""A limit on how long requests wait for weights that hold nothing: until an update has written them no step can run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

from ..edge.errors import HttpError

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0  # at most, between two looks


class Waiter(Protocol):
    """A request that waits."""

    def deliver(self, news: HttpError) -> None:
        """End the wait with an error."""


class LossWatch:
    """Look at the weights while requests are open, from one event loop."""

    def __init__(self, loss: Callable[[], str | None], limit_s: float, requests: Collection[Waiter]) -> None:
        """Watch these requests, a collection that changes. loss: why no step runs until the weights are updated; None:
        there is no such reason. limit_s: after it the requests that wait fail with 503."""
        self._loss, self._limit_s, self._requests = loss, limit_s, requests
        self._since: float | None = None  # when the weights were first found lost, while requests wait
        self._will_look = False

    def start(self) -> None:
        """Look from now on until no request is open. Called with each request."""
        if not self._will_look:
            self._will_look = True
            asyncio.get_running_loop().call_later(min(_PERIOD_S, self._limit_s / 4), self._look)

    def _look(self) -> None:
        self._will_look = False
        loss = self._loss() if self._requests else None
        if loss is None:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
            logger.warning("%d requests wait: %s", len(self._requests), loss)
        elif time.monotonic() - self._since >= self._limit_s:
            message = f"no request has run for {self._limit_s:g} s (refusal_timeout_s): {loss}"
            for request in list(self._requests):
                request.deliver(HttpError(503, message, headers={"Retry-After": "1"}))
            self._since = None
        if self._requests:
            self.start()
