"""Turns of requests that may have a body: in each pass of the event loop only a few of them begin.

To read, check and admit one takes about a millisecond of the event loop, and more while other threads compute. The loop
runs everything that is ready before it looks at its sockets again, and a report needs four or five such passes, so a
report asked beside hundreds of arrivals would wait for all of them several times over.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

NUM_A_PASS = 4
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


class Turns:
    """Let a few callers go on in each pass of an event loop, in the order in which they ask. Used by one loop."""

    def __init__(self, num_a_pass: int) -> None:
        """Start without callers. num_a_pass: callers that go on in one pass."""
        self._num_a_pass = self._num_left = num_a_pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._will_renew = False

    async def take(self) -> None:
        """Wait for a turn. Returns at once, in this pass, where no caller waits and a turn is left."""
        self._renew_soon()
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _renew_soon(self) -> None:
        if not self._will_renew:
            self._will_renew = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Begin the next pass."""
        self._will_renew = False
        self._num_left = self._num_a_pass
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task is cancelled
                turn.set_result(None)
                self._num_left -= 1
        if self._num_left < self._num_a_pass:
            self._renew_soon()


class TurnsMiddleware:
    """Begin requests that may have a body in turns. Reports, which have none, begin at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns(NUM_A_PASS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _WITHOUT_BODY:
            await self._turns.take()
        await self._app(scope, receive, send)
