"""State that is kept between sessions: the last outcome, the reason for poisoned weights, a commit that can be
reverted."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Poisoned, SessionError
from .records import SessionRecord, WeightSession

NONE_OPEN = "no weight-update session is open; call begin_weight_update() first"
MAX_NAMES_IN_STATE = 20


class SessionHistory:
    """State that a session manager keeps between two sessions. Only `state` is thread-safe."""

    def __init__(self) -> None:
        self.poison: str | None = None  # why the weights are poisoned
        # Why an explicit session ended without its client. Later updates of that client must not open an implicit
        # session.
        self.lost: str | None = None
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

    def check_update(self) -> None:
        """Raise Poisoned or SessionError where an update must not open an implicit session."""
        if self.poison is not None:
            raise Poisoned(self.refusal)
        if self.lost is not None:
            raise SessionError(self.lost)

    def check_revert(self) -> None:
        """Raise SessionError where no commit has its undo data kept."""
        if self.committed is None or not self.committed[0].transaction.can_revert:
            raise SessionError("there is no commit to revert, or what it overwrote is not kept")

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
        if session.explicit:
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
            "num_tensors_written": 0 if session is None else len(session.transaction.written_names()),
            "missing": {"count": len(missing), "names": missing[:MAX_NAMES_IN_STATE]},
            "why": why,
            "seconds_left": None if lease is None else lease.left_s,
        }
