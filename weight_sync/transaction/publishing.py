"""The commit of a session: what must hold before it, and its steps on all ranks."""

from __future__ import annotations

from ..errors import Poisoned
from .history import SessionHistory
from .host import SessionHost
from .peers import Peers
from .receiving import UNPROVEN
from .records import SessionRecord, WeightSession


def check_commit(session: WeightSession, history: SessionHistory) -> None:
    """Raise the reason why a session cannot be committed: ValueError for missing or unproven bytes, Poisoned where it
    should heal weights and was not fully verified."""
    session.transaction.check_complete()
    if session.healing is not None and (unverified := session.unverified()):
        raise Poisoned(f"{history.refusal}; not verified: {', '.join(unverified)}")
    if unproven := sorted(session.unchecked.intersection(session.transaction.written_units()) - session.verified):
        raise ValueError(f"{UNPROVEN}: {', '.join(unproven)}")


class Publishing:
    """Publish a session on all ranks or on none."""

    def __init__(self, session: WeightSession, record: SessionRecord, host: SessionHost, peers: Peers) -> None:
        self._session, self._record, self._host, self._peers = session, record, host, peers
        self.has_published = False  # here; where `run` raises the caller takes it back

    def prepare(self) -> None:
        """Digest and decide. A collective."""
        self._peers.together("decide", lambda: self._host.prepare_commit(self._record))

    def run(self) -> None:
        """Publish, after `prepare`. A collective. No step of it can fail on another rank only."""
        self._session.transaction.commit()
        self._peers.together("published", self._publish)

    def _publish(self) -> None:
        self._host.publish(self._record)
        self.has_published = True
