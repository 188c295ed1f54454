"""What the sessions before left behind: the outcome of the last one, poisoned weights, an undo that can be reverted."""

from __future__ import annotations

from ..errors import Poisoned, SessionError
from .records import SessionRecord, WeightSession

NONE_OPEN = "no weight-update session is open; call begin_weight_update() first"
MAX_NAMES_IN_STATE = 20


class SessionHistory:
    """The manager's memory between two sessions. Not thread-safe, but for `state`."""

    def __init__(self) -> None:
        self.poison: str | None = None  # why the weights are poisoned
        # Why an explicit session ended without its client: what the client still sends must not start another.
        self.lost: str | None = None
        self.committed: tuple[WeightSession, SessionRecord] | None = None  # while its undo is kept
        self._last: tuple[str, str | None, str] = ("idle", None, "")

    @property
    def outcome(self) -> str:
        """Of a session that failed, in words."""
        return "rolled back" if self.poison is None else "poisoned"

    @property
    def refusal(self) -> str:
        """Why poisoned weights take no update, and what heals them."""
        return f"{self.poison}; only an explicit session of full coverage with verify= heals them"

    def check_update(self) -> None:
        """Raise Poisoned or SessionError where an update must not open an implicit session."""
        if self.poison is not None:
            raise Poisoned(self.refusal)
        if self.lost is not None:
            raise SessionError(self.lost)

    def check_revert(self) -> None:
        """Raise SessionError where there is no commit whose undo is kept."""
        if self.committed is None or not self.committed[0].transaction.can_revert:
            raise SessionError("there is no commit to revert, or what it overwrote is not kept")

    def was_committed(self, session: WeightSession, record: SessionRecord) -> None:
        """Remember a commit, which can be reverted from now on."""
        self.poison = None
        self.committed = (session, record)
        self._last = ("committed", record.version, "")

    def was_rolled_back(self, session: WeightSession, why: str) -> None:
        """Remember a rollback, and whether it left the weights poisoned."""
        self.committed = None
        # Old bytes of a session that was to heal are poisoned ones.
        torn = f"the weights are torn and their old bytes are not kept ({why})"
        self.poison = session.healing if session.transaction.state == "rolled_back" else torn
        self._last = ("rolled_back", session.version, why)
        if session.explicit:
            self.lost = f"the weight-update session was rolled back ({why}); call begin_weight_update() first"

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
            "num_tensors_written": 0 if session is None else len(session.transaction.written_names()),
            "missing": {"count": len(missing), "names": missing[:MAX_NAMES_IN_STATE]},
            "why": why,
            "seconds_left": None if lease is None else lease.left_s,
        }
