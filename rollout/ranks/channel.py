"""Connect the ranks of a replica: messages and votes between the controller and each of its followers.

They use the replica's own group, so they never mix with a collective of a trainer or a stage. The loss of a rank wakes
the ranks that wait for a message, and a closed connection is detected at once. No thread polls, and no received byte
is unpickled.

`ControllerChannel` and `FollowerChannel` are the two sides; `open_channel` makes this rank's side.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...kernels.machine.running_time import running_time
from ..errors import RankFailure
from .mesh import Mesh
from .remote_verbs import VERB_TIMEOUT_S, RankResult, run_verb
from .watch import Cause, RankWatch
from .wire import Kind, Message, RankWire

logger = logging.getLogger(__name__)

ANNOUNCE_S = 8.0  # time to report a loss to all ranks


class RankChannel(ABC):
    """The common part of both sides: send, wait, and detect the loss of the replica.

    Any thread may send; one at a time waits for answers.
    """

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        """Connect the ranks, a collective of the replica. Messages arrive from here on: make the mailbox before."""
        self.mesh, self.timeout_s = mesh, timeout_s
        self.handlers: dict[str, Callable[..., Any]] = {}  # by verb: the functions that `run_everywhere` calls here
        self.on_loss: list[Callable[[], None]] = []  # called when the replica is lost, by any thread
        if mesh.tp_memory is not None:
            self.on_loss.append(mesh.tp_memory.stop)
        self._changed = threading.Condition()
        self._said_goodbye: set[int] = set()
        self._num_collectives = 0
        self._is_closed = False
        self.has_parted = False  # after `close`: every rank has left in order, so that none needs the mesh's groups
        self._announced = threading.Event()  # set when the loss was reported to all remaining ranks
        self._peers: list[int] = []  # local ranks; none in a replica of one rank, which then has no wire and no watch
        if mesh.replica_group is not None:
            self._peers = list(range(1, mesh.num_ranks)) if mesh.is_controller else [0]
            self._wire = RankWire(mesh.replica_group, self._peers, self._deliver, self._on_gone)
            self._watch = RankWatch(mesh, timeout_s, self._on_failure)
            self._wire.start()

    @property
    def watch(self) -> RankWatch:
        """The watch over signs of life. A replica of one rank has none."""
        assert self._peers
        return self._watch

    @property
    def num_bytes_sent(self) -> int:
        return self._wire.num_bytes_sent if self._peers else 0

    @property
    def num_messages_sent(self) -> int:
        return self._wire.num_messages_sent if self._peers else 0

    # -- collectives ------------------------------------------------------------------------------------------------

    @abstractmethod
    def gather_json(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Gather a JSON value from every rank; returns them by local rank. A collective of the replica.

        Raises RankFailure after the timeout. It names the ranks that did not take part.
        """

    @abstractmethod
    def run_everywhere(
        self, verb: str, arguments: Mapping[str, Any], timeout_s: float = VERB_TIMEOUT_S
    ) -> list[RankResult]:
        """Run `handlers[verb](**arguments)` on every rank, here too; returns one result each, by local rank.

        Followers run it between two steps: the caller keeps steps from running (`Engine.between_steps`). A handler's
        error is its result; a rank without the handler gives a success with `skipped`. Raises ValueError at a follower,
        DeadlineExceeded if ranks do not follow now, RankFailure if one ends or does not answer in time.
        """

    def check_controller(self, what: str) -> None:
        """Raise ValueError that names the controller, unless this rank is the controller."""
        if not self.mesh.is_controller:
            raise self._refusal(what)

    def _refusal(self, what: str) -> ValueError:
        first = self.mesh.plan.replica(self.mesh.rank)[0]
        return ValueError(f"{what}: rank {self.mesh.rank} follows the controller, rank {first}: call it there")

    def _run_verb(self, verb: str, arguments: Mapping[str, Any]) -> RankResult:
        """Run this rank's part of `run_everywhere`."""
        if not self._peers or verb not in self.handlers:
            return run_verb(self.handlers, verb, arguments, self.mesh)
        self.watch.enter(f"verb {verb}")
        try:
            return run_verb(self.handlers, verb, arguments, self.mesh)
        finally:
            self.watch.enter("waiting for ranks")

    # -- messages ---------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, id: int = 0, payload: bytes = b"", to: Collection[int] | None = None) -> None:
        """Send to these local ranks, by default to the controller or to all of its followers. Returns at once.

        Raises RankFailure if the replica is lost, or if a follower leaves hundreds of messages unread.
        """
        for rank in self._peers if to is None else to:
            self.check()
            self._before_send(rank)
            try:
                self._wire.send(rank, kind, id, payload)
            except RuntimeError as error:  # gloo's
                raise self._lose_peer(rank) from error

    @abstractmethod
    def _before_send(self, rank: int) -> None:
        """Wait until another message to that rank may be sent."""

    @abstractmethod
    def _take_in(self, rank: int, message: Message) -> None:
        """Keep a message for the thread that waits for it. The caller holds `_changed`."""

    def _deliver(self, rank: int, message: Message) -> bool:
        """Store a message for its waiting thread; returns whether it was the peer's last. Called by wire threads."""
        if message.kind is Kind.LOST:
            self.watch.accept(message.payload)
            return False
        with self._changed:
            self._take_in(rank, message)
            if message.kind in (Kind.END, Kind.BYE):
                self._said_goodbye.add(rank)
            self._changed.notify_all()
            return rank in self._said_goodbye

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `ready()`; False after the timeout. The caller holds `_changed`. Raises RankFailure."""
        end = None if timeout_s is None else running_time() + timeout_s
        while not ready():
            self.check()
            left_s = self.timeout_s / 4 if end is None else min(end - running_time(), self.timeout_s / 4)
            if left_s <= 0:
                return False
            if not self._changed.wait(left_s) and (cause := self.watch.silent_store()) is not None:
                raise self._error(self.watch.settle(cause))
        return True

    # -- loss -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RankFailure if the replica is lost."""
        if self._peers and self.watch.failure is not None:
            raise self._error(self.watch.failure)

    def lose(self, ranks: list[int], what: str) -> RankFailure:
        """Blame these local ranks for the loss of the replica; returns the error to raise, with its first cause."""
        return self._error(self.watch.post(self.watch.cause(ranks, what)))

    def explain(self, suspects: list[int], what: str) -> RankFailure:
        """Find the rank for which this rank waited in vain; returns the error to raise (see `RankWatch.explain`)."""
        return self._error(self.watch.explain(suspects, what))

    def _error(self, cause: Cause) -> RankFailure:
        # The rank that raises this may end its process, and the store with it: report to the others before.
        self._announced.wait(ANNOUNCE_S)
        return cause.error()

    def _on_gone(self, rank: int, error: RuntimeError) -> None:
        if not (self._is_closed or rank in self._said_goodbye):
            logger.debug("the connection to local rank %d: %s", rank, error)
            self._lose_peer(rank)

    def _lose_peer(self, rank: int) -> RankFailure:
        return self.lose([rank], "has ended: its connection closed")

    def _on_failure(self, cause: Cause) -> None:
        """Report the loss of the replica to other ranks and wake all threads that wait here."""
        logger.error("the replica is lost: %s", cause.why)
        self._tell_of_loss(cause)
        self._announced.set()
        with self._changed:
            self._changed.notify_all()
        for listener in self.on_loss:
            listener()

    @abstractmethod
    def _tell_of_loss(self, cause: Cause) -> None:
        """Report the loss to the ranks that cannot read it in the store."""

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the last message: afterwards another channel may use the group. Followers must be following then."""
        if self._is_closed or not self._peers:
            return
        if self.watch.failure is None:
            self.has_parted = self._say_goodbye()
        self._is_closed = True
        self.watch.close()
        if self.has_parted:
            self._wire.join(self.timeout_s)

    @abstractmethod
    def _say_goodbye(self) -> bool:
        """Send the last message to every peer. Returns whether all ranks have left in order."""
