"""The one session of a manager: it is opened, checked before each call by all ranks, committed, and rolled back.

Every method is called with the lock of calls held, but for `_locked`, which takes it, and the end of a lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..errors import SessionBusy, SessionError
from .call_lock import CallLock
from .history import SessionHistory
from .host import SessionHost
from .lease import Lease
from .owners import NONE_OPEN
from .peers import Peers, Tally, error_of
from .publishing import Publishing, check_commit
from .records import SessionRecord, WeightSession
from .rolling_back import take_back, tell_of_rollback
from .transaction import Coverage, Undo, WeightTransaction

_COLLECTIVE = ("begin", "update", "verify", "commit", "rollback", "revert", "read")  # methods in which all ranks vote


class OneSession:
    """At most one open session, and the history of those before it."""

    def __init__(
        self,
        host: SessionHost,
        peers: Peers | None,
        lock_timeout_s: float,
        as_a_whole: AbstractContextManager[object],
    ) -> None:
        self._host, self._as_a_whole = host, as_a_whole
        self._peers = peers or Peers()
        self._lock = CallLock(lock_timeout_s)
        self._session: WeightSession | None = None
        self._history = SessionHistory()

    def _locked(self, what: str, timeout_s: float | None) -> AbstractContextManager[None]:
        def on_busy(error: SessionBusy) -> None:
            if what.split()[0] in _COLLECTIVE:
                self._peers.vote(what.split()[0], error)  # the others wait for this rank's report

        return self._lock.held(what, timeout_s, on_busy)

    def _open(
        self,
        version: str | None,
        coverage: Coverage,
        undo: Undo,
        explicit: bool,
        lease_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        client: str | None = None,
    ) -> WeightSession:
        started, lease = time.monotonic(), None if lease_s is None else Lease(lease_s)

        def make() -> WeightTransaction:
            transaction = self._host.make_transaction(coverage, undo)
            prepare()
            return transaction

        try:
            transaction = self._peers.together("open", make)
            session = WeightSession(
                transaction, explicit, version, started, lease, client, healing=self._history.poison
            )
            self._history.release_undo()
            self._session = session
        except BaseException:
            self._session = None
            self._host.on_dropped()
            raise
        if lease is not None:
            lease.call_at_end(lambda: self._on_lease_over(session))
        return session

    def _ready(self, what: str, check: Callable[[], None]) -> None:
        """Run a check that changes nothing, and raise its error, from this rank or another. If the session's lease has
        expired on any rank, the session is rolled back first."""
        if self._peers.is_alone:
            if self._session is not None and self._session.is_expired:  # a call may come before the timer's thread
                self._expire(self._session)
            check()
            return
        error = error_of(check)
        try:
            is_expired = self._session is not None and self._session.is_expired
            tally = self._peers.vote(what, error, expired=is_expired)
        except BaseException as lost:  # a rank is lost, and the session with it
            if self._session is not None:
                self._roll_back(self._session, f"{what}: {lost}")
            raise
        if tally.expired and self._session is not None:
            self._expire(self._session)
            check()  # finds the same on every rank
            return
        tally.raise_if_any(error)

    def _require_session(self, client: str | None) -> WeightSession:
        self._history.owners.check(self._session, client)
        if self._session is None:
            raise SessionError(self._history.lost or NONE_OPEN)
        return self._session

    def _why_not_to_abort(self, client: str | None) -> SessionError | None:
        """Return why there is nothing to roll back for this client; None: there is, or it was."""
        session, owners = self._session, self._history.owners
        if owners.has_ended(client) or (session is None and client is None and self._history.is_unheard):
            return None
        if session is None:
            return SessionError(NONE_OPEN)
        return owners.why_not_to_abort(session, client)

    def _commit(
        self, version: str | None, client: str | None, prepare: Callable[[], None] = lambda: None
    ) -> SessionRecord:
        self._ready("commit", lambda: check_commit(self._require_session(client), self._history))
        session = self._require_session(client)
        prepare()
        record = session.record(version)
        publishing = Publishing(session, record, self._host, self._peers)
        try:
            publishing.prepare()
            with self._as_a_whole:
                publishing.run()
                self._close(session)
                self._history.was_committed(session, record)
        except BaseException as error:
            if self._session is session:  # else an interrupt has waited for the commit, which stands
                self._take_back(session, publishing, f"publishing failed: {error}")
            raise
        return record

    def _take_back(self, session: WeightSession, publishing: Publishing, why: str) -> None:
        with self._as_a_whole:
            self._roll_back(session, why)
            if publishing.has_published:
                self._host.unpublish()  # after the rollback: the version returns with the old bytes

    def _roll_back(self, session: WeightSession, why: str, *, alone: bool = False) -> Tally:
        """Restore the old bytes or mark the weights as poisoned, on all ranks of the model, and end the session.
        alone: whether the other ranks do nothing of it. Returns what the ranks report, and raises the error of this
        rank's undo."""
        failed, tally = None, Tally()
        with self._as_a_whole:
            try:
                failed = error_of(lambda: take_back(session.transaction))
            finally:  # where the undo fails too, the weights are poisoned
                self._close(session)
                self._history.was_rolled_back(session, why)
                tally = tell_of_rollback(why, failed, self._history, self._host, Peers() if alone else self._peers)
        if failed is not None:
            raise failed
        return tally

    def _close(self, session: WeightSession) -> None:
        if session.lease is not None:
            session.lease.cancel()
        self._session = None

    def _expire(self, session: WeightSession) -> None:
        assert session.lease is not None
        self._roll_back(session, f"it expired: its client was silent for {session.lease.seconds:g} s")
        self._host.on_expired()

    def _on_lease_over(self, session: WeightSession) -> None:
        """End the session, in the timer's thread. Waits for a running update, which has its own deadline."""
        if not self._peers.is_alone:  # one rank must not roll back alone: the others may still commit
            if self._session is session:
                self._host.on_lease_over()
            return
        with self._lock.held_at_last("lease"):
            if self._session is session and session.is_expired:  # it may have been renewed since
                self._expire(session)
