"""Pins of sessions: the KV of a last turn stays in the cache until the next one, or until the session ends.

A pin is set on a thread after the answer, so no request waits for it. What the budget of the engine (`pin_budget`) has
no room for is not pinned, and a session without pins works as any other. Pins have no time of their own: while there
are some, a task looks for sessions that have expired, and lifts all pins where the server ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ....rollout.engine import Engine
from ....rollout.errors import LockstepError
from ....rollout.media.images import PromptWithImages
from ..edge.threads import Threads
from .session import Session
from .store import Sessions
from .turns import Turn, tokens_of

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks for sessions that have expired
_END_S = 2.0  # that a server's end waits for the engine to lift the pins


class SessionPins:
    """The pins of one server's sessions."""

    def __init__(self, engine: Engine, sessions: Sessions, threads: Threads) -> None:
        """Pin the turns of sessions that ask for it from now on. threads: on which calls may wait for a step."""
        self._engine, self._sessions, self._threads = engine, sessions, threads
        self._running: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._pinned: dict[int, Session] = {}  # sessions with pins, by number; changes under the lock of the sessions
        self._num_pinned = 0  # turns, for their owners' names
        self._is_over = False  # the event loop ends
        sessions.on_turn, sessions.on_closed = self._renew, self._drop
        sessions.num_pinned = self._count

    def _renew(self, session: Session, turn: Turn) -> None:
        """Pin a new turn, then lift the pins of the turn before it. Called on the event loop."""
        if session.options.pin:
            self._run(lambda: self._pin(session, turn))
            if self._watch is None or self._watch.done():
                self._is_over = False
                self._watch = asyncio.get_running_loop().create_task(self._look())

    def _drop(self, session: Session) -> None:
        """Lift the pins of a session that has ended. Called on the event loop."""
        if session.pinned:
            self._run(lambda: self._swap(session, None, "", ()))

    async def _look(self) -> None:
        """Lift the pins of sessions that have expired, and all at the end of the event loop."""
        try:
            while self._pinned or self._running:
                await asyncio.sleep(_LOOK_S)
                self._sessions.expire()
                for session in [one for one in self._held() if one.has_ended]:
                    self._drop(session)
        except asyncio.CancelledError:
            self._is_over = True
            try:
                await asyncio.wait_for(self._threads.run(self._drop_all), _END_S)
            except (LockstepError, TimeoutError) as error:  # an engine that has ended has no pins
                logger.warning("the pins of sessions could not be lifted: %s", error or "the engine does not answer")
            raise

    def _pin(self, session: Session, turn: Turn) -> None:
        # Under an owner of its own: were its blocks flushed meanwhile, the former turn's end would lift the new pins.
        with self._sessions.lock:
            self._num_pinned += 1
            owner = f"session {session.number} turn {self._num_pinned}"
        # In this order: blocks that both turns have are never without a pin.
        prompt = tokens_of(turn) if turn.images is None else PromptWithImages(tokens_of(turn), turn.images)
        report = self._engine.pin_prefix(prompt, owner, extra_key=turn.extra_key)
        if report.num_refused:
            logger.warning("%s: %d blocks are not pinned: %s", owner, report.num_refused, report.reason)
        self._swap(session, turn, owner, report.hashes)

    def _swap(self, session: Session, turn: Turn | None, owner: str, hashes: tuple[int, ...]) -> None:
        """Take the new pins of a turn as the session's and lift the former; the new ones instead where the session, the
        server, or the time of the turn as the last one is over meanwhile."""
        with self._sessions.lock:
            has_ended = session.has_ended or self._is_over
            lifted = []
            if turn is not None and (has_ended or session.last is not turn):
                lifted.append((owner, hashes))
            if has_ended or session.last is turn:
                lifted.append((session.pin_owner, session.pinned))
                session.pin_owner, session.pinned = ("", ()) if has_ended else (owner, hashes)
            if session.pinned:
                self._pinned[session.number] = session
            else:
                self._pinned.pop(session.number, None)
        for former, theirs in lifted:
            if theirs:
                self._engine.unpin_blocks(theirs, former)

    def _drop_all(self) -> None:
        for session in self._held():
            self._swap(session, None, "", ())

    def _held(self) -> list[Session]:
        with self._sessions.lock:
            return list(self._pinned.values())

    def _count(self, session: Session) -> int:
        """Return the number of blocks that the engine has pinned for a session: a flush or a commit lifts pins, too.
        Waits for a step."""
        with self._sessions.lock:
            owner, hashes = session.pin_owner, session.pinned
        if not hashes:
            return 0
        pins = self._engine.parts.ledger.pins
        return self._engine.driver.look(lambda: sum(owner in pins.owners(hash) for hash in hashes))

    def _run(self, call: Callable[[], None]) -> None:
        async def run() -> None:
            try:
                await self._threads.run(call)
            except LockstepError as error:  # the engine ends: its pins end with it
                logger.warning("the pins of a session could not be set: %s", error)

        task = asyncio.get_running_loop().create_task(run())
        self._running.add(task)  # asyncio keeps only weak references
        task.add_done_callback(self._running.discard)
