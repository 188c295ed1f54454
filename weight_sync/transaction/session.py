"""Weight-update sessions: which update belongs to which commit, and what happens to those that never get there.

    idle -- begin, or update (implicit) --> open -- commit --> committed -- revert --> rolled_back
                                             \\-- failure, rollback or lease --> rolled_back, or poisoned

Knows no engine: opening transactions, publishing and digesting are callbacks. Where several ranks hold one model each
has a manager, every call is made on all of them, and they vote (`peers`) before anything that cannot be taken back:
what fails on one rank is undone on all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from ..errors import DigestMismatch, Poisoned, SessionError, TransferFailed
from ..layout.sink import Sink
from ..manifest import TensorSpec
from .peers import Peers, Tally
from .records import SessionRecord, UpdateRecord, WeightSession
from .transaction import Coverage, Undo, WeightTransaction

logger = logging.getLogger(__name__)

ALREADY_OPEN = "a weight-update session is already open; call end_weight_update() first"
NONE_OPEN = "no weight-update session is open; call begin_weight_update() first"
MAX_NAMES_IN_STATE = 20
LEASE_THREAD = "weight-update-lease"

_COLLECTIVE = ("begin", "update", "verify", "commit", "rollback", "revert")  # methods in which all ranks vote
_UNPROVEN = (
    "a delta changed tensors that are cut over ranks, where its own digests cannot be checked: give the digests of the "
    "result (verify=), or send it in a session and verify_weight_update"
)
_REPAIR_NOW = "the session is still open: sending these again repairs it"
_REPAIR_IN_A_SESSION = (
    "everything since the last commit was rolled back; inside a session (begin_weight_update) sending only these again "
    "repairs it"
)


class SessionManager:
    """Holds the one session there may be. Thread-safe: methods exclude each other, `state` never waits.

    make_transaction(coverage, undo): over the resident tensors. publish(record): makes a commit visible, once each; if
    it raises, the commit is taken back. unpublish(): the commit that was published just now is taken back, because of
    another rank. digest_roots(names): tensor roots (digest.tensor_root) of what is resident now, under the names given,
    aliases among them, but for tensors that ranks hold different bytes of. on_rollback(why): after every rollback, also
    those that poisoned. on_dropped: after a session that ended before anything was written. prepare_commit(record):
    what a commit needs of other ranks; it may raise, then the session is rolled back. Of the manager's methods a
    callback may call `state` only.

    peers: the other ranks of a model that is spread over several. Every method but `state`, `name_version`, `close` and
    `release_undo` is then a collective, with PeerFailed for what failed elsewhere. on_lease_over: called in a thread
    when the time of a session of several ranks is over, to give it up on all of them; without it the next call does.
    A call waits at most its `timeout_s`, else `lock_timeout_s`, for another that is under way; then it raises
    SessionError and nothing changed.
    """

    def __init__(
        self,
        make_transaction: Callable[[Coverage, Undo], WeightTransaction],
        publish: Callable[[SessionRecord], None],
        digest_roots: Callable[[Sequence[str]], dict[str, bytes]],
        *,
        on_rollback: Callable[[str], None] | None = None,
        on_dropped: Callable[[], None] = lambda: None,
        prepare_commit: Callable[[SessionRecord], None] = lambda record: None,
        unpublish: Callable[[], None] = lambda: None,
        peers: Peers | None = None,
        on_lease_over: Callable[[], None] = lambda: None,
        lock_timeout_s: float = 60.0,
    ) -> None:
        self._make_transaction = make_transaction
        self._publish = publish
        self._digest_roots = digest_roots
        self._on_rollback = on_rollback
        self._on_dropped = on_dropped
        self._prepare_commit = prepare_commit
        self._unpublish = unpublish
        self._peers = peers or Peers()
        self._on_lease_over = on_lease_over
        self._lock = threading.Lock()
        self._lock_timeout_s = lock_timeout_s
        self._busy = ""  # what holds the lock, for those who waited in vain
        self._session: WeightSession | None = None
        self._last: tuple[Literal["idle", "committed", "rolled_back"], str | None, str] = ("idle", None, "")
        self._committed: tuple[WeightSession, SessionRecord] | None = None
        self._poison: str | None = None
        # Why an explicit session ended without its client: what the client still sends must not start another.
        self._lost: str | None = None

    # -- verbs --------------------------------------------------------------------------------------------------------

    def begin(
        self,
        version: str | None = None,
        coverage: Coverage = "full",
        undo: Undo = "tensors",
        timeout_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Open an explicit session. One that is not ended within `timeout_s` is rolled back.

        prepare: a callback right before it is open; what it raises is raised, and everything stays as it was.
        The undo of the commit before is released. Raises SessionError where a session is open, ValueError for unknown
        options, and Poisoned where the weights are and `coverage` is not "full".
        """
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        with self._locked("begin", None if timeout_s is None else min(timeout_s, self._lock_timeout_s)):

            def check() -> None:
                if self._session is not None:
                    raise SessionError(ALREADY_OPEN)
                if self._poison is not None and coverage != "full":
                    raise Poisoned(self._refusal())

            self._ready("begin", check)
            self._open(version, coverage, undo, explicit=True, lease_s=timeout_s, prepare=prepare)
            self._lost = None

    def update(
        self,
        source: str,
        receive: Callable[[Sink], Sequence[TensorSpec]],
        version: str | None = None,
        verify: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> UpdateRecord:
        """Run one update, inside the open session or else in an implicit one of partial coverage that it opens.

        prepare: a callback before an update outside of an explicit session; what it raises is raised, and nothing has
        changed, on no rank.

        source: where it comes from, for records ("distributed", "disk", ...). receive(sink): fills the sink and returns
        the specs of what it wrote. verify: hex tensor roots by name; names that are not written are passed over.

        Whatever `receive` raises is raised again after the whole session was rolled back; only where nothing of this
        update was written yet, everything stays as it was. Raises TransferFailed, likewise, where bytes of those specs
        never arrived. Raises DigestMismatch: an explicit session stays open without these tensors, so that sending
        them again repairs it; an implicit one is rolled back. Raises Poisoned outside of a session that heals.
        """
        with self._locked(f"update from {source}", timeout_s):

            def check() -> None:
                self._check_update()
                if self._session is not None and not self._session.explicit:
                    prepare()

            self._ready("update", check)
            session, opened, before = self._session, self._session is None, self._last
            if session is None:
                session = self._open(None, "partial", "tensors", explicit=False, prepare=prepare)
            transaction, started = session.transaction, time.monotonic()
            transaction.start_update()
            num_writes, tally = transaction.num_writes, Tally()
            try:
                specs, error = _received(source, receive, transaction)
                wrote = transaction.num_writes > num_writes
                tally = self._peers.vote("update received", error, wrote=wrote, names=transaction.unchecked())
                tally.raise_if_any(error)
                unproven = tally.names - {transaction.tensor_name(name) for name in verify or {}}
                if unproven and not session.explicit:
                    raise TransferFailed(f"{source}: {_UNPROVEN}: {', '.join(sorted(unproven))}")
                differing = self._differing(specs, verify or {})
                if differing and not session.explicit:
                    raise DigestMismatch(differing, _REPAIR_IN_A_SESSION)
                matching = set(verify or {}) - set(differing)
                is_verified = session.account(source, version, specs, matching, set(tally.names))
                transaction.restore(differing)
            except BaseException as error:
                if tally.wrote or transaction.num_writes > num_writes:
                    self._roll_back(session, f"{source}: {error}")
                    error.add_note(f"the weight-update session is {self._outcome()}")
                elif opened:
                    self._session, self._last = None, before
                    self._on_dropped()
                raise
            if differing:
                raise DigestMismatch(differing, _REPAIR_NOW)
            num_bytes = sum(spec.num_bytes for spec in specs)
            seconds = time.monotonic() - started
            return UpdateRecord(source, version, len(specs), num_bytes, is_verified, session.explicit, seconds)

    def verify(self, digests: Mapping[str, str], timeout_s: float | None = None) -> None:
        """Compare what the open session wrote with the sender's digests, hex tensor roots by name.

        Raises SessionError where none is open, ValueError listing names that were not written, and DigestMismatch: an
        explicit session stays open without the tensors that differ, so that sending them again repairs it; an implicit
        one is rolled back.
        """
        with self._locked("verify", timeout_s):

            def check() -> None:
                transaction = self._require_session().transaction
                written = set(transaction.written_names())
                if unknown := [name for name in digests if transaction.tensor_name(name) not in written]:
                    raise ValueError(f"digests of tensors that were not written: {', '.join(unknown)}")

            self._ready("verify", check)
            session = self._require_session()
            transaction = session.transaction
            try:
                differing = self._not_as(digests, list(digests))
            except BaseException as error:
                if not self._peers.is_alone:  # a rank is gone, and with it what it held
                    self._roll_back(session, f"verify: {error}")
                raise
            session.verified |= {transaction.tensor_name(name) for name in digests}
            session.verified -= {transaction.tensor_name(name) for name in differing}
            if not differing:
                return
            if session.explicit:
                transaction.restore(differing)
                raise DigestMismatch(differing, _REPAIR_NOW)
            error = DigestMismatch(differing, _REPAIR_IN_A_SESSION)
            self._roll_back(session, str(error))
            raise error

    def name_version(self, version: str, timeout_s: float | None = None) -> None:
        """The open session will commit as `version`. Raises SessionError where none is open."""
        with self._locked("name_version", timeout_s):
            self._require_session().version = version

    def commit(self, version: str | None = None, timeout_s: float | None = None) -> SessionRecord:
        """End the open session, explicit or implicit, and publish it. Its undo is kept until `release_undo` or the next
        session.

        Raises SessionError where none is open or where its lease expired. Raises ValueError listing what is missing,
        and Poisoned in a session that would heal but was not verified whole; both leave it open. Where publishing
        fails the session is rolled back.
        """
        with self._locked("commit", timeout_s):
            return self._commit(version)

    def commit_implicit(self, timeout_s: float | None = None) -> SessionRecord | None:
        """`commit`, of an implicit session; None where none is open."""
        with self._locked("commit", timeout_s):
            if self._session is None or self._session.explicit:
                return None
            return self._commit(None)

    def rollback(self, why: str = "asked for", timeout_s: float | None = None) -> None:
        """Give the open session up; or take note that it ended by itself. Raises SessionError where there was none."""
        with self._locked("rollback", timeout_s):

            def give_up() -> None:
                if self._session is None and self._lost is None:
                    raise SessionError(NONE_OPEN)
                if self._session is not None:
                    self._roll_back(self._session, why)
                self._lost = None

            error = _error_of(give_up)  # first of all here: it needs nobody's consent
            self._peers.vote("rollback", error).raise_if_any(error)

    def close(self, why: str) -> None:
        """Give an open session up on this rank, whatever the others do."""
        with self._locked("close", None):
            if self._session is not None:
                self._roll_back(self._session, why)

    def revert(self, timeout_s: float | None = None) -> SessionRecord:
        """Take the last commit back and return its record; publishes nothing: the caller labels the old weights.

        Raises SessionError while a session is open, and where there is no commit whose undo is kept.
        """
        with self._locked("revert", timeout_s):

            def check() -> None:
                if self._session is not None:
                    raise SessionError(ALREADY_OPEN)
                if self._committed is None or not self._committed[0].transaction.can_revert:
                    raise SessionError("there is no commit to revert, or what it overwrote is not kept")

            self._ready("revert", check)
            assert self._committed is not None
            session, record = self._committed
            self._roll_back(session, f"the commit of version {record.version} was reverted")
            self._lost = None
            return record

    def release_undo(self, timeout_s: float | None = None) -> None:
        """Free what the last commit overwrote; it stands from then on. Does nothing where nothing is kept."""
        with self._locked("release_undo", timeout_s):
            self._release_undo()

    @property
    def is_explicit(self) -> bool:
        """Whether a session is open that was begun explicitly; waits for nobody."""
        session = self._session
        return session is not None and session.explicit

    def state(self) -> dict[str, object]:
        """For the state report; does not wait for an update that is under way, and changes nothing."""
        session = self._session
        if session is None:
            state, version, why = self._last
            state, why = (state, why) if self._poison is None else ("poisoned", self._poison)
            missing: list[str] = []
        else:
            state, version, why = "open", session.version, self._poison or ""
            missing = list(session.transaction.missing())
        deadline = None if session is None else session.deadline
        seconds_left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return {
            "state": state,
            "version": version,
            "explicit": session is not None and session.explicit,
            "num_tensors_written": 0 if session is None else len(session.transaction.written_names()),
            "missing": {"count": len(missing), "names": missing[:MAX_NAMES_IN_STATE]},
            "why": why,
            "seconds_left": seconds_left,
        }

    # -- inside, with the lock held -----------------------------------------------------------------------------------

    @contextmanager
    def _locked(self, what: str, timeout_s: float | None) -> Iterator[None]:
        limit = self._lock_timeout_s if timeout_s is None else timeout_s
        if not self._lock.acquire(timeout=limit):
            error = SessionError(f"{what}: waited {limit:g} s for another call that is under way ({self._busy})")
            if what.split()[0] in _COLLECTIVE:
                self._peers.vote(what.split()[0], error)  # the others wait to hear from this rank
            raise error
        try:
            self._busy = what
            yield
        finally:
            self._lock.release()

    def _open(
        self,
        version: str | None,
        coverage: Coverage,
        undo: Undo,
        explicit: bool,
        lease_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> WeightSession:
        now = time.monotonic()
        made: list[WeightTransaction] = []

        def make() -> None:
            made.append(self._make_transaction(coverage, undo))
            prepare()

        error = _error_of(make)
        try:
            self._peers.vote("open", error).raise_if_any(error)
        except BaseException:
            self._on_dropped()
            raise
        session = WeightSession(made[0], explicit, version, now, lease_s, healing=self._poison)
        self._release_undo()
        if lease_s is not None:
            session.deadline = now + lease_s
            end = self._lease_over if self._peers.is_alone else self._lease_over_everywhere
            session.timer = threading.Timer(lease_s, end, (session,))
            session.timer.daemon, session.timer.name = True, LEASE_THREAD
            session.timer.start()
        self._session = session
        return session

    def _ready(self, what: str, check: Callable[[], None]) -> None:
        """Run a check that changes nothing, and raise what it raises, here or on another rank. A session whose time is
        over, to any rank, is rolled back first."""
        if self._peers.is_alone:
            self._end_if_expired()
            check()
            return
        error = _error_of(check)
        try:
            tally = self._peers.vote(what, error, expired=self._is_expired(self._session))
        except BaseException as lost:  # somebody is gone, and with them the session
            if self._session is not None:
                self._roll_back(self._session, f"{what}: {lost}")
            raise
        if tally.expired and self._session is not None:
            self._expire(self._session)
            check()  # finds the same on every rank
            return
        tally.raise_if_any(error)

    def _require_session(self) -> WeightSession:
        if self._session is None:
            raise SessionError(self._lost or NONE_OPEN)
        return self._session

    def _commit(self, version: str | None) -> SessionRecord:
        """Check, digest, decide, publish: only what cannot fail elsewhere comes after the decision."""
        self._ready("commit", self._check_commit)
        session = self._require_session()
        transaction, record = session.transaction, session.record(version)
        is_published = False
        try:
            error = _error_of(lambda: self._prepare_commit(record))
            self._peers.vote("decide", error).raise_if_any(error)
            transaction.commit()
            error = _error_of(lambda: self._publish(record))
            is_published = error is None
            self._peers.vote("published", error).raise_if_any(error)
        except BaseException as error:
            self._roll_back(session, f"publishing failed: {error}")
            if is_published:
                self._unpublish()
            raise
        self._close(session)
        self._poison = None
        self._committed = (session, record)
        self._last = ("committed", record.version, "")
        return record

    def _check_commit(self) -> None:
        session = self._require_session()
        session.transaction.check_complete()
        if session.healing is not None and (unverified := session.unverified()):
            raise Poisoned(f"{self._refusal()}; not verified: {', '.join(unverified)}")
        if unproven := sorted(session.unchecked - session.verified):
            raise ValueError(f"{_UNPROVEN}: {', '.join(unproven)}")

    def _differing(self, specs: Sequence[TensorSpec], verify: Mapping[str, str]) -> list[str]:
        return self._not_as(verify, [spec.name for spec in specs if spec.name in verify])

    def _not_as(self, digests: Mapping[str, str], names: Sequence[str]) -> list[str]:
        """Which of these have other digests than the sender's, or different bytes on different ranks."""
        roots = self._digest_roots(names) if names else {}
        return [name for name in names if roots.get(name, b"").hex() != digests[name].lower()]

    def _roll_back(self, session: WeightSession, why: str) -> None:
        """Put the old bytes back, or find the weights poisoned, and end the session."""
        transaction = session.transaction
        try:
            if transaction.can_revert:
                transaction.revert()
            elif transaction.state == "open":
                transaction.rollback()
        finally:
            self._close(session)
            self._committed = None
            # Old bytes of a session that was to heal are poisoned ones.
            torn = f"the weights are torn and their old bytes are not kept ({why})"
            self._poison = session.healing if transaction.state == "rolled_back" else torn
            self._last = ("rolled_back", session.version, why)
            if session.explicit:
                self._lost = f"the weight-update session was rolled back ({why}); call begin_weight_update() first"
        logger.warning("weight-update session %s: %s", self._outcome(), why)
        if self._on_rollback is not None:
            self._on_rollback(why)

    def _close(self, session: WeightSession) -> None:
        if session.timer is not None:
            session.timer.cancel()
        self._session = None

    def _release_undo(self) -> None:
        if self._committed is not None:
            self._committed[0].transaction.release_undo()
            self._committed = None

    def _outcome(self) -> str:
        return "rolled back" if self._poison is None else "poisoned"

    def _refusal(self) -> str:
        return f"{self._poison}; only an explicit session of full coverage with verify= heals them"

    def _check_update(self) -> None:
        if self._session is not None:
            return
        if self._poison is not None:
            raise Poisoned(self._refusal())
        if self._lost is not None:
            raise SessionError(self._lost)

    # -- lease --------------------------------------------------------------------------------------------------------

    def _lease_over(self, session: WeightSession) -> None:
        """In the timer's thread. Waits for an update that is receiving: that one has a deadline of its own."""
        with self._lock:
            self._busy = "lease"
            if self._session is session:
                self._expire(session)

    def _lease_over_everywhere(self, session: WeightSession) -> None:
        """In the timer's thread. One rank must not give up alone what the others may still commit."""
        if self._session is session:
            self._on_lease_over()

    def _end_if_expired(self) -> None:
        """A caller may be faster than the timer's thread."""
        session = self._session
        if session is not None and self._is_expired(session):
            self._expire(session)

    def _is_expired(self, session: WeightSession | None) -> bool:
        deadline = None if session is None else session.deadline
        return deadline is not None and time.monotonic() >= deadline

    def _expire(self, session: WeightSession) -> None:
        self._roll_back(session, f"it expired: it was not ended within {session.lease_s:g} s")


def _received(
    source: str, receive: Callable[[Sink], Sequence[TensorSpec]], transaction: WeightTransaction
) -> tuple[tuple[TensorSpec, ...], Exception | None]:
    """The specs of what was received, whole, or why it was not."""
    specs: list[TensorSpec] = []

    def receive_whole() -> None:
        specs.extend(receive(transaction))
        if absent := transaction.unwritten(spec.name for spec in specs):
            listed = "; ".join(transaction.describe(absent))
            raise TransferFailed(f"{source}: {len(absent)} tensors did not arrive whole: {listed}")

    error = _error_of(receive_whole)
    return tuple(specs), error


def _error_of(action: Callable[[], None]) -> Exception | None:
    """What it raises, for the other ranks to hear of it before it is raised."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is: on one rank alone it would leave the others waiting
        return error
    return None
