"""Hedged requests: where a worker delivers nothing for a while, a second one gets the request too, and the first answer
counts (J. Dean and L. A. Barroso, The Tail at Scale, 2013). Both workers draw the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ..relay import Relay

Attempt = tuple[Relay, Coroutine[Any, Any, str]]  # the client's side, and what returns its error or ""


class Race:
    """Two attempts at one request, of which the one that delivers first goes on alone."""

    def __init__(self, relay: Relay, attempt: Coroutine[Any, Any, str]) -> None:
        """Prepare the first attempt. `run` starts it."""
        self._won = asyncio.Event()
        self._first, self._attempt = relay, attempt
        self._tasks: dict[Relay, asyncio.Task[str]] = {}
        self._claim = Claim(self._won, self._tasks)
        self.has_second = False

    @property
    def winner(self) -> Relay | None:
        """The side of the client that has delivered; None: none has."""
        return self._claim.winner

    async def run(self, after_s: float, second: Callable[[], Attempt | None]) -> tuple[Relay, str]:
        """Run the first attempt and, where it has delivered nothing after so many seconds, the one that `second`
        returns. Returns the winner with its error; where both fail, the first. Raises the errors of the one that
        counts."""
        self._first.claim = self._claim
        tasks = self._tasks
        tasks[self._first] = asyncio.create_task(self._attempt)
        watching = asyncio.create_task(self._won.wait())
        try:
            await asyncio.wait({*tasks.values(), watching}, timeout=after_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._won.is_set() and not tasks[self._first].done() and (other := second()) is not None:
                self.has_second, self._first.is_last, relay = True, False, other[0]
                relay.claim = self._claim
                tasks[relay] = asyncio.create_task(other[1])
            pending = set(tasks.values())
            while pending and not self._won.is_set():
                done, _ = await asyncio.wait({*pending, watching}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                for task in done - {watching}:
                    if not task.cancelled():
                        task.result()  # an error of the request: it ends both
            winner = self.winner or self._first
            for relay, task in tasks.items():
                if relay is not winner and not task.done():
                    relay.lose()
                    task.cancel()
            return winner, await tasks[winner]
        finally:
            for task in (*tasks.values(), watching):
                task.cancel()
            await asyncio.gather(*tasks.values(), watching, return_exceptions=True)


class Claim:
    """The right to answer the client, which the first attempt that delivers has."""

    def __init__(self, won: asyncio.Event, tasks: Mapping[Relay, asyncio.Task[str]]) -> None:
        """Create it. tasks: the attempts that have begun."""
        self._won, self._tasks = won, tasks
        self.winner: Relay | None = None

    def is_wanted(self, relay: Relay) -> bool:
        """Return whether the other attempt may still deliver, so that an error of this one is no answer yet."""
        return self.winner is None and any(not task.done() for one, task in self._tasks.items() if one is not relay)

    def take(self, relay: Relay) -> bool:
        """Claim the client's connection. Returns whether this attempt has it."""
        if self.winner is None:
            self.winner = relay
            self._won.set()
        return self.winner is relay
