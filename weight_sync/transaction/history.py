"""State that is kept between sessions: the last outcome, the reason for poisoned weights, a commit that can be
reverted."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Poisoned, SessionError
from .owners import Owners
from .records import SessionRecord, WeightSession

MAX_NAMES_IN_STATE = 20


class SessionHistory:
    """State that a session manager keeps between two sessions. Only `state` is thread-safe."""

    def __init__(self) -> None:
        self.poison: str | None = None  # why the weights are poisoned
        self.owners = Owners()
        # Why an explicit session of a client without a name ended without it, or an implicit one. Its later updates
        # must not open an implicit session.
        self.lost: str | None = None
        self._is_aborted = False  # `lost` was asked for, by its client or by another one
        self.is_unheard = False  # the last explicit session was rolled back, and no abort has come since
        self.committed: tuple[WeightSession, SessionRecord] | None = None  # while its undo is kept
        self._last: tuple[str, str | None, str] = ("idle", None, "")

    @property
    def outcome(self) -> str:
        """Name the outcome of a failed session: "rolled back" or "poisoned"."""
        return "rolled back" if self.poison is None else "poisoned"

    @property
    def refusal(self) -> str:
        """Explain why poisoned weights take no update, and which session heals them."""
        return f"{self.poison}; only an explicit session of full coverage with verify= heals them"

    def check_update(self, is_whole: bool) -> None:
        """Raise Poisoned or SessionError where an update must not open an implicit session. is_whole: it replaces all
        weights, and so is no part of a session that was aborted."""
        if self.poison is not None:
            raise Poisoned(self.refusal)
        if self.lost is not None and not (is_whole and self._is_aborted):
            raise SessionError(self.lost)

    def check_revert(self, client: str | None) -> None:
        """Raise SessionError where no commit, of this client if it is named, has its undo data kept."""
        if self.committed is None or not self.committed[0].transaction.can_revert:
            raise SessionError("there is no commit to revert, or what it overwrote is not kept")
        self.owners.check_revert(self.committed[0], client)

    def has_begun(self, client: str | None) -> None:
        """Note that an explicit session was opened."""
        self.lost, self._is_aborted, self.is_unheard = None, False, False
        self.owners.has_begun(client)

    def was_aborted(self, is_lost: bool) -> None:
        """Note that the session that was rolled back last was given up on request. is_lost: not of its client. It is
        not known who has asked: buckets that its client sends afterwards must not open an implicit session."""
        self._is_aborted, self.is_unheard = not is_lost, is_lost

    def was_lost(self, why: str) -> None:
        """Note that an implicit session was rolled back without its client, whose further updates must not open another
        one, until it pauses generation or begins a session."""
        self.lost = f"the weight update was rolled back ({why}): pause generation again and send all of it"
        self._is_aborted = True

    def was_accepted(self) -> None:
        """Note that a client without a name knows that its session has ended."""
        self.lost, self._is_aborted, self.is_unheard = None, False, False

    def forget_abort(self) -> None:
        """Note that another update is prepared: what comes now is no part of a session that was aborted."""
        if self._is_aborted:
            self.lost, self._is_aborted = None, False

    def was_committed(self, session: WeightSession, record: SessionRecord) -> None:
        """Remember a commit, which can be reverted from now on."""
        self.poison = None
        self.committed = (session, record)
        self._last = ("committed", record.version, "")

    def was_rolled_back(self, session: WeightSession, why: str) -> None:
        """Remember a rollback and whether the weights are poisoned after it."""
        self.committed = None
        # A session that was to heal poisoned weights has poisoned bytes as its old ones.
        old = "are not kept" if session.transaction.undo == "none" else "could not be restored"
        torn = f"the weights are partly written and their old bytes {old} ({why})"
        self.poison = session.healing if session.transaction.state == "rolled_back" else torn
        self._last = ("rolled_back", session.version, why)
        self.owners.was_rolled_back(session, why)
        self._is_aborted, self.is_unheard = False, session.explicit
        if session.explicit and session.client is None:
            self.lost = f"the weight-update session was rolled back ({why}); call begin_weight_update() first"

    def learn_poison(self, by_rank: Mapping[int, str]) -> None:
        """Remember that the weights of other ranks of the model are poisoned, and with them the model's."""
        if self.poison is None and by_rank:
            self.poison = "; ".join(f"rank {rank}: {why}" for rank, why in by_rank.items())

    def release_undo(self) -> None:
        """Free the memory of the last commit's undo."""
        if self.committed is not None:
            self.committed[0].transaction.release_undo()
            self.committed = None

    def state(self, session: WeightSession | None) -> dict[str, object]:
        """Report on the open session, else on the last one. Changes nothing."""
        if session is not None:
            state, version, why = "open", session.version, self.poison or ""
        else:
            state, version, why = self._last
            state, why = (state, why) if self.poison is None else ("poisoned", self.poison)
        missing = [] if session is None else list(session.transaction.missing())
        lease = None if session is None else session.lease
        return {
            "state": state,
            "version": version,
            "explicit": session is not None and session.explicit,
            "client": None if session is None else session.client,
            "num_tensors_written": 0 if session is None else len(session.transaction.written_names()),
            "missing": {"count": len(missing), "names": missing[:MAX_NAMES_IN_STATE]},
            "why": why,
            "seconds_left": None if lease is None else lease.left_s,
        }
