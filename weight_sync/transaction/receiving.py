"""One update of a session: receive its bytes, exchange the ranks' results, compare digests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import DigestMismatch, TransferFailed
from ..layout.sink import Sink
from ..manifest import TensorSpec
from .host import SessionHost
from .peers import Peers, Tally, error_of
from .records import UpdateRecord, WeightSession

Receive = Callable[[Sink], Sequence[TensorSpec]]  # fills the sink, returns the specs of the tensors that it wrote

UNPROVEN = (
    "a delta changed tensors that are cut over ranks, where its own digests cannot be checked: give the digests of the "
    "result (verify=), or send it in a session and verify_weight_update"
)
REPAIR_NOW = "the session is still open: sending these again repairs it"
REPAIR_IN_A_SESSION = (
    "everything since the last commit was rolled back; inside a session (begin_weight_update) sending only these again "
    "repairs it"
)


def not_as(host: SessionHost, digests: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """List the names whose resident bytes differ from the sender's digests or between ranks."""
    roots = host.digest_roots(names) if names else {}
    return [name for name in names if roots.get(name, b"").hex() != digests[name].lower()]


class Receiving:
    """The reception of one update into the open session. Every rank has one at the same time. Rolls nothing back
    itself."""

    def __init__(self, session: WeightSession, host: SessionHost, peers: Peers) -> None:
        self.differing: list[str] = []  # after `run`: tensors restored because their digests differ from the sender's
        self._session, self._host, self._peers = session, host, peers
        self._transaction = session.transaction
        self._started = time.monotonic()
        self._transaction.start_update()
        self._num_writes = self._transaction.num_writes
        self._tally = Tally()

    @property
    def wrote(self) -> bool:
        """Whether bytes were written, here or on another rank."""
        return self._tally.wrote or self._wrote_here

    @property
    def _wrote_here(self) -> bool:
        return self._transaction.num_writes > self._num_writes

    def run(self, source: str, receive: Receive, version: str | None, verify: Mapping[str, str]) -> UpdateRecord:
        """Receive and verify the update; see `SessionManager.update`.

        An explicit session counts tensors whose digests differ as not written (`differing`); an implicit one raises
        DigestMismatch. verify: read after `receive` has returned, so `receive` may fill it.
        """
        transaction, session = self._transaction, self._session
        specs = self._received(source, receive)
        compared = transaction.comparable(verify, specs)
        unproven = self._tally.names - {unit for name in compared for unit in transaction.units(name)}
        if unproven and not session.explicit:
            raise TransferFailed(f"{source}: {UNPROVEN}: {', '.join(sorted(unproven))}")
        with self._peers.apart_if_it_fails():
            differing = not_as(self._host, verify, compared)
        if differing and not session.explicit:
            raise DigestMismatch(differing, REPAIR_IN_A_SESSION)
        is_verified = session.account(source, version, specs, set(compared) - set(differing), set(self._tally.names))
        if differing:
            self._peers.together("repair", lambda: transaction.restore(differing))
        self.differing = differing
        num_bytes, seconds = sum(spec.num_bytes for spec in specs), time.monotonic() - self._started
        return UpdateRecord(source, version, len(specs), num_bytes, is_verified, session.explicit, seconds)

    def _received(self, source: str, receive: Receive) -> Sequence[TensorSpec]:
        """Receive the update and return the specs of the tensors that arrived whole on every rank."""
        transaction, specs = self._transaction, list[TensorSpec]()

        def receive_whole() -> None:
            specs.extend(receive(transaction))
            if absent := transaction.unwritten(spec.name for spec in specs):
                listed = "; ".join(transaction.describe(absent))
                raise TransferFailed(f"{source}: {len(absent)} tensors did not arrive whole: {listed}")

        with self._peers.apart_if_it_fails():  # with what is no Exception, as at Ctrl-C
            error = error_of(receive_whole)
        wrote, names = self._wrote_here, transaction.unchecked()
        self._tally = self._peers.vote("update received", error, wrote=wrote, names=names)
        self._tally.raise_if_any(error)
        return specs
