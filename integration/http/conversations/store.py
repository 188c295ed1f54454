"""The sessions of a server: opened, found, closed and expired, within limits of number, memory and idle time.

No thread watches the clock: each call first ends the sessions whose time is over. A session with an open request does
not expire. Any thread may call.
"""

from __future__ import annotations

import heapq
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

from ....rollout.errors import Overloaded
from ..edge.config import HttpConfig
from ..edge.errors import BadField, Draining, HttpError
from ..edge.session_paths import FIELD
from .next_turn import NextTurn
from .params import SessionParams
from .session import Session, SessionOptions
from .turns import Turn

_MIN_DEADLINES = 64
ENDINGS = ("closed", "expired", "unused")  # why sessions end; unused: see `Sessions.finish`


class Sessions:
    """All sessions of one server."""

    def __init__(self, config: HttpConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a session. clock: seconds."""
        self._config, self._clock = config, clock
        self.lock = threading.RLock()  # the fields of sessions change under it
        self._sessions: dict[str, Session] = {}
        self._deadlines: list[tuple[float, str, int]] = []  # heap of (time, id, number of the session); some are old
        self._ended: OrderedDict[str, str] = OrderedDict()  # why each of the newest sessions ended that are no more
        self._num_bytes = 0  # of open sessions and their turns
        self._num_reserved = 0  # bytes that open requests will add, without their outputs
        self.num_opened = 0
        self.num_ended = dict.fromkeys(ENDINGS, 0)
        self.on_turn: Callable[[Session, Turn], None] = lambda session, turn: None  # called after each turn
        self.on_closed: Callable[[Session], None] = lambda session: None  # not where it expired
        self.num_pinned: Callable[[Session], int] = lambda session: 0  # counts the blocks that are pinned for it
        self.is_opened_by_requests = True  # whether `open` of a request opens one
        self.is_draining = False  # no session is opened any more: the server will end

    def open(
        self, id: str | None = None, options: SessionOptions | None = None, *, field: str = "session_id"
    ) -> Session:
        """Open a session. id: None: a new one. field: that names it. Raises BadField for an id that is open or not
        printable, Overloaded where there are too many, Draining."""
        options = options or SessionOptions()
        with self.lock:
            self._expire()
            if self.is_draining:
                raise Draining
            if id is not None and not id.isprintable():
                raise BadField(field, "must be printable")
            if id is not None and id in self._sessions:
                raise BadField(field, f"a session {id!r} is open already")
            if len(self._sessions) >= (limit := self._config.max_sessions):
                raise Overloaded(f"{limit} sessions are open, which is the limit (max_sessions)")
            self._check_bytes(options.num_bytes + 1)
            id = id or uuid.uuid4().hex
            timeout_s = min(options.timeout_s or self._config.session_idle_s, self._config.session_idle_s)
            session = Session(id, self.num_opened, options, timeout_s, self._clock())
            self._sessions[id] = session
            self._ended.pop(id, None)
            self._num_bytes += session.num_bytes
            self.num_opened += 1
            self._note_deadline(session)
            return session

    def find(self, id: str, field: str) -> Session:
        """Return an open session. Raises HttpError 404 that says whether it is unknown, closed or expired. field: that
        named it."""
        with self.lock:
            self._expire()
            session = self._sessions.get(id)
            if session is None:
                raise self._missing(id, field)
            return session

    def close(self, id: str) -> None:
        """Close a session. Open requests on it are answered, and are no turns of it. Raises as `find`."""
        with self.lock:
            session = self.find(id, "session_id")
            self._end(session, "closed")
        self.on_closed(session)

    def begin(self, params: SessionParams, rid: str, *, may_branch: bool = False) -> NextTurn:
        """Begin a request on a session; call its `end` in the end. rid: its id. may_branch: see `Session.settled`.
        Raises HttpError 404 as `find`, 409 where a streaming session has an open request, BadField, Overloaded where
        the sessions take too much memory."""
        with self.lock:
            self._expire()
            is_known = params.id in self._sessions or params.id in self._ended
            if params.open and not is_known and self.is_opened_by_requests:
                session = self.open(params.id, field=f"{FIELD}.id")
                session.needs_turn = True
            else:
                session = self.find(params.id, f"{FIELD}.id")
            try:
                self._check_bytes()
                params = session.settled(params, may_branch=may_branch)
                base = session.base_of(params, rid)
                session.begin(rid, self._clock())
            finally:
                self._end_unused(session)
            return NextTurn(session, params, rid, base, self)

    def reserve(self, next_turn: NextTurn, num_bytes: int) -> None:
        """Count the bytes that a request will add, before its output, until it ends. Raises Overloaded beyond the
        limit."""
        with self.lock:
            self._check_bytes(num_bytes)
            if next_turn.is_open:
                next_turn.num_reserved += num_bytes
                self._num_reserved += num_bytes

    def keep(self, next_turn: NextTurn, turn: Turn) -> bool:
        """Add the turn of a request that was answered. Returns False where it has no place: the request has ended
        without its answer, as where its client left, the session has ended, or the turn before it was replaced."""
        with self.lock:
            session = next_turn.session
            if not next_turn.is_open:
                return False
            self._count_no_more(next_turn)  # a client may send the next request before this one's stream is closed
            num_bytes = session.num_bytes
            if session.has_ended or not session.add(turn, replaces=next_turn.params.replace):
                return False
            self._num_bytes += session.num_bytes - num_bytes
            return True

    def number(self, next_turn: NextTurn, digest: int) -> int:
        """Return which of its session's requests with this prompt it is, see `Numbers`."""
        with self.lock:
            if next_turn.has_ended:  # its client has left
                return 0
            number = next_turn.session.numbers.take(digest)
            next_turn.numbered = (digest, number)
            return number

    def finish(self, next_turn: NextTurn) -> None:
        """Count a request on a session no longer. A session that requests have opened ends where none was answered."""
        with self.lock:
            self._count_no_more(next_turn)
            if next_turn.kept is None and next_turn.numbered is not None:
                next_turn.session.numbers.give_back(*next_turn.numbered)
                next_turn.numbered = None
            self._end_unused(next_turn.session)
        if next_turn.kept is not None:
            self.on_turn(next_turn.session, next_turn.kept)

    def expire(self) -> None:
        """End the sessions whose time is over."""
        with self.lock:
            self._expire()

    def seconds_left(self, session: Session) -> float:
        """Return the time after which a session expires if nothing uses it."""
        return max(0.0, session.deadline - self._clock())

    def report(self) -> dict[str, int]:
        """Count the sessions, their turns and their bytes."""
        with self.lock:
            self._expire()
            return {
                "num_open": len(self._sessions),
                "num_turns": sum(len(session.turns) for session in self._sessions.values()),
                "num_bytes": self._num_bytes,
                "num_open_requests": sum(len(session.open_rids) for session in self._sessions.values()),
                "num_opened": self.num_opened,
                **{f"num_{why}": num for why, num in self.num_ended.items()},
            }

    def _count_no_more(self, next_turn: NextTurn) -> None:
        if next_turn.is_open:
            next_turn.is_open = False
            self._num_reserved -= next_turn.num_reserved
            next_turn.session.finish(next_turn.rid, self._clock())

    def _check_bytes(self, num_more: int = 1) -> None:
        taken = self._num_bytes + self._num_reserved
        if taken + num_more > (limit := self._config.max_session_bytes):
            raise Overloaded(
                f"the open sessions take {taken} bytes, and {num_more} more would be over the limit of {limit} "
                "(max_session_bytes): close some, or wait until they expire"
            )

    def _missing(self, id: str, field: str) -> HttpError:
        why = self._ended.get(id)
        if why == "expired":
            what = f"has expired: nothing used it for its time, which session_idle_s limits to " \
                   f"{self._config.session_idle_s:g} s"  # fmt: skip
        elif why == "closed":
            what = "was closed"
        else:
            what = "is unknown: open it with /open_session, or it was lost with a server that ended"
        code = f"session_{why or 'unknown'}"
        return HttpError(404, f"{field}: the session {id!r} {what}", param=field, code=code)

    def _expire(self) -> None:
        """End the sessions whose time is over. Costs nothing where there are none."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id, number = heapq.heappop(self._deadlines)
            session = self._sessions.get(id)
            if session is None or session.number != number:
                continue  # it was closed
            if session.deadline <= now and not session.open_rids:
                self._end(session, "expired")
            else:  # it was used since; one with an open request is looked at again when its time could be over
                when = max(session.deadline, now + min(session.timeout_s, 1.0))
                heapq.heappush(self._deadlines, (when, id, number))

    def _note_deadline(self, session: Session) -> None:
        heapq.heappush(self._deadlines, (session.deadline, session.id, session.number))
        if len(self._deadlines) > max(2 * len(self._sessions), _MIN_DEADLINES):  # else those of closed ones pile up
            self._deadlines = [(one.deadline, one.id, one.number) for one in self._sessions.values()]
            heapq.heapify(self._deadlines)

    def _end_unused(self, session: Session) -> None:
        """End a session that a request has opened, if all on it have failed: it has lost no tokens, and may be opened
        again."""
        if session.needs_turn and not (session.turns or session.open_rids or session.has_ended):
            self._end(session, "unused")

    def _end(self, session: Session, why: str) -> None:
        del self._sessions[session.id]
        session.has_ended = True
        self._num_bytes -= session.num_bytes
        session.clear()
        self.num_ended[why] += 1
        if why == "unused":
            return
        self._ended[session.id] = why
        while len(self._ended) > self._config.max_sessions:
            self._ended.popitem(last=False)
