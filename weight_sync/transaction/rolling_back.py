"""The end of a session that takes its writes back. Ranks that hold one model together are poisoned together."""

from __future__ import annotations

import logging

from .history import SessionHistory
from .host import SessionHost
from .peers import Peers, Tally
from .transaction import WeightTransaction

logger = logging.getLogger(__name__)


def take_back(transaction: WeightTransaction) -> None:
    """Restore the old bytes of a transaction that is open, or committed with its undo kept. One that has ended
    otherwise stays as it is."""
    if transaction.can_revert:
        transaction.revert()
    elif transaction.state == "open":
        transaction.rollback()


def tell_of_rollback(
    why: str, failed: Exception | None, history: SessionHistory, host: SessionHost, peers: Peers
) -> Tally:
    """Exchange whether the weights are poisoned after a rollback, and tell the host. Returns what the ranks report.

    One rank may have restored its bytes where another could not, or had written nothing yet: the model of all of them
    is then poisoned. A collective, but where the ranks are apart already: such a replica runs no step any more.
    failed: the error of this rank's undo.
    """
    tally = Tally()
    try:
        if not peers.are_apart:
            tally = peers.vote("rolled back", failed, poison=history.poison)
            history.learn_poison(tally.poison)
    finally:
        logger.warning("weight-update session %s: %s", history.outcome, why)
        host.on_rollback(history.poison or why, history.poison is not None)
    return tally
