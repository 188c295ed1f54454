"""Weight-update sessions: group updates into commits, and roll back sessions that fail.

    idle -- begin, or update (implicit) --> open -- commit --> committed -- revert --> rolled_back
                                             \\-- failure, rollback or lease --> rolled_back, or poisoned

A session knows no engine: a `SessionHost` opens transactions, publishes and digests. Where several ranks hold one model
each rank has a manager, every call is made on all ranks, and they vote (`peers`) before each step that cannot be
undone. A failure on one rank is undone on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeVar

from ..errors import DigestMismatch, Poisoned, SessionError, WeightSyncError
from .host import SessionHost
from .one_session import OneSession
from .peers import Peers, error_of
from .receiving import REPAIR_IN_A_SESSION, REPAIR_NOW, Receive, Receiving, not_as
from .records import SessionRecord, UpdateRecord
from .transaction import Coverage, Undo

T = TypeVar("T")


class SessionManager(OneSession):
    """The manager of at most one open session. Thread-safe: methods exclude each other, `state` never waits.

    peers: the other ranks of a model that is spread over several ranks. Every method but `state`, `name_version`,
    `close`, `without_session` and `release_undo` is then a collective and raises PeerFailed for a failure elsewhere. A
    call waits at most its `timeout_s`, else `lock_timeout_s`, for another call that is running; then it raises
    SessionBusy and changes nothing. client: the name of the caller, see `owners`; None: it has none. as_a_whole: a
    context, re-entrant, in which interrupts of the main thread wait: bytes and their publication change together.
    """

    def __init__(
        self,
        host: SessionHost,
        *,
        peers: Peers | None = None,
        lock_timeout_s: float = 60.0,
        as_a_whole: AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(host, peers, lock_timeout_s, as_a_whole or nullcontext())

    # -- verbs --------------------------------------------------------------------------------------------------------

    def begin(
        self,
        version: str | None = None,
        coverage: Coverage = "full",
        undo: Undo = "tensors",
        lease_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        client: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Open an explicit session. It is rolled back where nothing of it is called for `lease_s`: its begin, and each
        update and verify that ends well, start that time.

        prepare: a callback right before the session opens; its exception is raised, and nothing has changed. Undo data
        of the last commit is released. Raises SessionError where a session is open, ValueError for unknown options, and
        Poisoned where the weights are poisoned and `coverage` is not "full".
        """
        if lease_s is not None and lease_s <= 0:
            raise ValueError(f"lease_s must be positive, not {lease_s}")
        waits = [seconds for seconds in (lease_s, timeout_s, self._lock.timeout_s) if seconds is not None]
        with self._locked("begin", min(waits)):

            def check() -> None:
                if self._session is not None:
                    raise SessionError(self._session.already_open)
                if self._history.poison is not None and coverage != "full":
                    raise Poisoned(self._history.refusal)

            self._ready("begin", check)
            try:
                self._open(version, coverage, undo, explicit=True, lease_s=lease_s, prepare=prepare, client=client)
                self._history.has_begun(client)
            except BaseException as error:
                if self._session is not None and self._peers.is_alone:  # an interrupt: its client has not begun it
                    self._roll_back(self._session, f"begin: {type(error).__name__}")
                    self._history.was_accepted()
                raise

    def update(
        self,
        source: str,
        receive: Receive,
        version: str | None = None,
        verify: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        client: str | None = None,
        is_whole: bool = False,
    ) -> UpdateRecord:
        """Run one update in the open session, or open an implicit session of partial coverage for it, but not for a
        `client`: raises SessionError where it has none, or another one's is open. is_whole: it replaces all weights.

        prepare: a callback before an update outside of an explicit session; its exception is raised, and nothing has
        changed on any rank.

        source: the origin of the update, for records ("distributed", "disk", ...). receive(sink): fills the sink and
        returns the specs of the tensors that it wrote. verify: hex tensor roots by name, of the sent names or of others
        of the same bytes; names whose bytes did not all come are ignored.

        An exception of `receive` is raised again after the whole session was rolled back; if nothing of this update was
        written yet, the session stays unchanged. Raises TransferFailed, likewise, where bytes of those specs never
        arrived. Raises DigestMismatch: an explicit session stays open without these tensors, and sending them again
        repairs it; an implicit one is rolled back. Raises Poisoned outside of a session that heals.
        """
        with self._locked(f"update from {source}", timeout_s):

            def check() -> None:
                self._history.owners.check(self._session, client)
                if self._session is None:
                    self._history.check_update(is_whole)
                elif not self._session.explicit:
                    prepare()

            self._ready("update", check)
            session, opened = self._session, self._session is None
            if session is None:
                session = self._open(None, "partial", "tensors", explicit=False, prepare=prepare)
            receiving = Receiving(session, self._host, self._peers)
            try:
                record = receiving.run(source, receive, version, {} if verify is None else verify)
            except BaseException as error:
                if receiving.wrote:
                    self._roll_back(session, f"{source}: {error}")
                    error.add_note(f"the weight-update session is {self._history.outcome}")
                elif opened:
                    self._session = None
                    self._host.on_dropped()
                raise
            session.is_heard()
            if receiving.differing:
                raise DigestMismatch(receiving.differing, REPAIR_NOW)
            return record

    def verify(self, digests: Mapping[str, str], timeout_s: float | None = None, client: str | None = None) -> None:
        """Compare the written tensors of the open session with the sender's digests, hex tensor roots by name.

        Raises SessionError where no session is open, ValueError listing names that were not written, and
        DigestMismatch: an explicit session stays open without the tensors that differ, and sending them again repairs
        it; an implicit one is rolled back. Raises Poisoned where they cannot be restored: the session has ended.
        """
        with self._locked("verify", timeout_s):

            def check() -> None:
                transaction = self._require_session(client).transaction
                if unknown := [name for name in digests if not transaction.has_written(name)]:
                    raise ValueError(f"digests of tensors that were not written: {', '.join(unknown)}")

            self._ready("verify", check)
            session = self._require_session(client)
            transaction = session.transaction
            try:
                with self._peers.apart_if_it_fails():
                    differing = not_as(self._host, digests, list(digests))
                session.verified |= {unit for name in digests for unit in transaction.units(name)}
                session.verified -= {unit for name in differing for unit in transaction.units(name)}
                if session.explicit and differing:
                    self._peers.together("repair", lambda: transaction.restore(differing))
            except BaseException as error:  # a rank is lost, and its part of the session with it, or there is no undo
                if not self._peers.is_alone or transaction.state == "poisoned":
                    self._roll_back(session, f"verify: {error}")
                raise
            session.is_heard()
            if differing:
                mismatch = DigestMismatch(differing, REPAIR_NOW if session.explicit else REPAIR_IN_A_SESSION)
                if not session.explicit:
                    self._roll_back(session, str(mismatch))
                raise mismatch

    def name_version(
        self,
        version: str,
        relabel: Callable[[str], object],
        timeout_s: float | None = None,
        client: str | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Set the version under which the open session will commit, or call `relabel` where none is open. prepare: a
        callback right before. Raises SessionError, and calls neither, where the session is not this client's."""
        with self._locked("name_version", timeout_s):
            self._history.owners.check(self._session, client)
            prepare()
            if self._session is None:
                relabel(version)
            else:
                self._session.version = version

    def commit(
        self,
        version: str | None = None,
        timeout_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        client: str | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> SessionRecord:
        """End the open session, explicit or implicit, and publish it. Its undo data is kept until `release_undo` or the
        next session. prepare: called before, where the session can be committed; then: called after the commit, both
        with the lock held. Raises SessionError where no session is open or its
        lease has expired; ValueError listing missing bytes, and Poisoned in a session that should heal but was not
        fully verified: both leave it open. If publishing fails, the session is rolled back.
        """
        with self._locked("commit", timeout_s):
            self._history.owners.check(self._session, client)
            record = self._commit(version, client, prepare)
            then()
            return record

    def commit_implicit(self, timeout_s: float | None = None, *, or_roll_back: bool = False) -> SessionRecord | None:
        """Commit an implicit session as `commit` does. Returns None where none is open. or_roll_back: one that cannot
        be committed, because some of its bytes are missing for instance, is rolled back."""
        with self._locked("commit", timeout_s):
            if self._session is None or self._session.explicit:
                return None
            try:
                return self._commit(None, None)
            except (ValueError, WeightSyncError) as error:
                if or_roll_back and self._session is not None:
                    self._roll_back(self._session, f"it could not be committed: {error}")
                raise

    def end_implicit(self, why: str, timeout_s: float | None = None) -> None:
        """End an implicit session whose client is lost: commit it where it has written all weights, else roll it back.
        Updates that follow then open no other one, before `begin` or `forget_abort`, unless they are whole."""
        with self._locked("commit", timeout_s):
            session = self._session
            if session is None or session.explicit:
                return
            if not session.transaction.missing() and error_of(session.transaction.check_complete) is None:
                self._commit(None, None)
            else:
                self._roll_back(session, why).raise_if_any(None)
                self._history.was_lost(why)

    def rollback(
        self,
        why: str = "asked for",
        timeout_s: float | None = None,
        *,
        is_lost: bool = False,
        only_expired: bool = False,
        client: str | None = None,
    ) -> None:
        """Roll back the open session, or accept that it already ended by itself. Raises SessionError where there was
        none, or that of a named `client` is not the open one and has not ended so. is_lost: its client did not ask for
        it, and may do so later. only_expired: raise SessionError unless its lease is over on some rank, as where
        another session has begun meanwhile.
        """
        with self._locked("rollback", timeout_s):
            if only_expired:
                is_expired = self._session is not None and self._session.is_expired
                tally = self._peers.vote("rollback", expired=is_expired)
                tally.raise_if_any(None)
                if not tally.expired:
                    raise SessionError("no session has expired")

            missing = self._why_not_to_abort(client)
            if self._session is not None and missing is None and not self._history.owners.has_ended(client):
                self._roll_back(self._session, why).raise_if_any(None)  # first: it needs no other rank's consent
                self._history.was_aborted(is_lost)
            else:
                self._peers.vote("rolled back", missing).raise_if_any(missing)
                if client is None and not is_lost:
                    self._history.was_accepted()

    def close(self, why: str) -> None:
        """Roll back an open session on this rank, whatever the others do."""
        with self._locked("close", None):
            if self._session is not None:
                self._roll_back(self._session, why, alone=True)

    def revert(
        self,
        timeout_s: float | None = None,
        client: str | None = None,
        holding: Callable[[], AbstractContextManager[object]] = nullcontext,
        prepare: Callable[[], object] = lambda: None,
    ) -> SessionRecord:
        """Take the last commit and its publication back, and return its record. holding: makes a context that is
        entered before, and left with the lock still held; its exception is raised, and nothing has changed on any rank.
        prepare: called then, on all ranks.

        Raises SessionError while a session is open, and where no commit, of this client if it is named, has its undo
        data kept.
        """
        with self._locked("revert", timeout_s), ExitStack() as held:

            def check() -> None:
                if self._session is not None:
                    raise SessionError(self._session.already_open)
                self._history.check_revert(client)
                held.enter_context(holding())

            self._ready("revert", check)
            prepare()
            assert self._history.committed is not None
            session, record = self._history.committed
            with self._as_a_whole:
                self._roll_back(session, f"the commit of version {record.version} was reverted").raise_if_any(None)
                self._host.unpublish()
                self._history.was_accepted()
            return record

    def release_undo(self, timeout_s: float | None = None) -> None:
        """Free the undo data of the last commit, which then cannot be reverted. Does nothing where none is kept."""
        with self._locked("release_undo", timeout_s):
            self._history.release_undo()

    def forget_abort(self) -> None:
        """Note that generation is paused for another update; see `SessionHistory.forget_abort`. Does not wait."""
        self._history.forget_abort()

    def without_session(
        self, who: str, action: Callable[[], T], timeout_s: float | None = None, *, undo_goes_first: bool = True
    ) -> T:
        """Run an action that writes or frees the weights, while no session can be opened. Undo data of the last commit
        is freed first; else where the action has ended well. Raises SessionError where a session is open."""
        with self._locked(who, timeout_s):
            if self._session is not None:
                raise SessionError(f"{who}: a weight-update session is open: end it or give it up first")
            if undo_goes_first:
                self._history.release_undo()
            value = action()
            self._history.release_undo()
            return value

    def between_sessions(
        self, what: str, check: Callable[[], None], action: Callable[[], T], timeout_s: float | None = None
    ) -> T:
        """Run an action that reads the published weights, while no session can be opened. Undo data of the last commit
        is kept. Raises SessionError where a session is open, and the error of `check`, on any rank: then the action
        runs on none."""
        with self._locked("read", timeout_s):

            def check_all() -> None:
                if self._session is not None:
                    raise SessionError(f"{what}: a weight-update session is open")
                check()

            self._ready("read", check_all)
            return action()

    @property
    def is_explicit(self) -> bool:
        """Whether an explicitly begun session is open. Does not wait for the lock."""
        session = self._session
        return session is not None and session.explicit

    @property
    def client(self) -> str | None:
        """The name of the open session's client; None: it has none, or none is open. Does not wait for the lock."""
        session = self._session
        return None if session is None else session.client

    def check_client(self, client: str | None) -> None:
        """Raise SessionError as a call of this client would. Does not wait for the lock."""
        self._history.owners.check(self._session, client)

    def settled_client(self, timeout_s: float | None = None) -> str | None:
        """Return `client` once no call runs. Raises SessionBusy where one runs too long."""
        with self._locked("look", timeout_s):
            return self.client

    @property
    def opened_at(self) -> float | None:
        """The moment at which the open explicit session began, of time.monotonic; None: there is none. Does not wait
        for the lock."""
        session = self._session
        return session.started if session is not None and session.explicit else None

    def state(self) -> dict[str, object]:
        """Return the data of the state report. Does not wait for an update that is running, and changes nothing."""
        return self._history.state(self._session)
