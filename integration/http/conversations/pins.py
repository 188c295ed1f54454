"""Pins of sessions: the KV of a last turn stays in the cache until the next one, or until the session ends.

A pin is set on a thread after the answer, so no request waits for it. What the budget of the engine (`pin_budget`) has
no room for is not pinned, and a session without pins works as any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ....rollout.engine import Engine
from ....rollout.errors import LockstepError
from ..edge.threads import Threads
from .session import Session
from .store import Sessions
from .turns import Turn, tokens_of

logger = logging.getLogger(__name__)


class SessionPins:
    """The pins of one server's sessions."""

    def __init__(self, engine: Engine, sessions: Sessions, threads: Threads) -> None:
        """Pin the turns of sessions that ask for it from now on. threads: on which calls may wait for a step."""
        self._engine, self._sessions, self._threads = engine, sessions, threads
        self._running: set[asyncio.Task[None]] = set()
        sessions.on_turn, sessions.on_closed = self._renew, self._drop

    def _renew(self, session: Session, turn: Turn) -> None:
        """Pin a new turn, then lift the pins of the turn before it. Called on the event loop."""
        if session.options.pin:
            self._run(lambda: self._pin(session, turn))

    def _drop(self, session: Session) -> None:
        """Lift the pins of a session that has ended. Called on the event loop."""
        if session.pinned:
            self._run(lambda: self._swap(session, ()))

    def _pin(self, session: Session, turn: Turn) -> None:
        # In this order: blocks that both turns have are never without a pin.
        report = self._engine.pin_prefix(
            tokens_of(turn), _owner(session), session.timeout_s, extra_key=turn.extra_key
        )  # fmt: skip
        if report.num_refused:
            logger.warning("%s: %d blocks are not pinned: %s", _owner(session), report.num_refused, report.reason)
        self._swap(session, report.hashes)

    def _swap(self, session: Session, hashes: tuple[int, ...]) -> None:
        with self._sessions.lock:
            former = session.pinned + (hashes if session.has_ended else ())
            session.pinned = () if session.has_ended else hashes
        if former:
            self._engine.unpin_blocks(former, _owner(session))

    def _run(self, call: Callable[[], None]) -> None:
        async def run() -> None:
            try:
                await self._threads.run(call)
            except LockstepError as error:  # the engine ends: its pins end with it
                logger.warning("the pins of a session could not be set: %s", error)

        task = asyncio.get_running_loop().create_task(run())
        self._running.add(task)  # asyncio keeps only weak references
        task.add_done_callback(self._running.discard)


def _owner(session: Session) -> str:
    return f"session {session.number}"
