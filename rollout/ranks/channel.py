"""How the ranks of a replica talk: messages between the controller and each of its followers, votes, admin verbs.

They go over the replica's own group, so they never meet a collective of a trainer or a stage. Whoever waits for one is
woken by the news that a rank is lost, and a connection that closes is noticed when it happens. Nobody polls, and
nothing that arrives is unpickled.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import DeadlineExceeded, LockstepError, RankFailure
from .mesh import Mesh
from .watch import IDLE, Cause, RankWatch
from .wire import Kind, Message, RankWire

logger = logging.getLogger(__name__)

_NUM_UNREAD = 256  # messages that a follower has not read, before the controller waits for it
_TELL_EVERY = 32  # messages
_ANNOUNCE_S = 8.0  # for telling everybody of a loss
VERB_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class RankResult:
    """What one rank said to a verb."""

    rank: int  # of the world
    pp_rank: int
    tp_rank: int
    success: bool
    message: str
    data: Any = None  # JSON
    error: str | None = None  # the exception's class, where it failed

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class RankChannel:
    """Messages, votes and verbs among the ranks of one replica. Any thread may send; one at a time converses."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.mesh, self.timeout_s = mesh, timeout_s
        self.handlers: dict[str, Callable[..., Any]] = {}  # by verb: what `run_everywhere` runs on this rank
        self.on_loss: list[Callable[[], None]] = []  # called when the replica is lost, by any thread
        self.present: dict[int, int] = {}  # of the controller: who follows, and how (the id of its HERE)
        self._changed = threading.Condition()
        self._inbox: deque[Message] = deque()  # of a follower
        self._mail: dict[tuple[Kind, int], dict[int, Message]] = {}  # of the controller: by sender
        self._unwanted: set[int] = set()  # steps whose results nobody will ask for
        self._said_goodbye: set[int] = set()
        self._num_collectives = self._num_verbs = 0
        self._is_closed = False
        self._announced = threading.Event()  # everybody was told of the loss
        self._peers: list[int] = []
        if mesh.replica_group is not None:
            self._peers = list(range(1, mesh.num_ranks)) if mesh.is_controller else [0]
            self._wire = RankWire(mesh.replica_group, self._peers, self._deliver, self._on_gone)
            self._watch = RankWatch(mesh, timeout_s, self._on_failure)
            self._wire.start()

    @property
    def watch(self) -> RankWatch:
        """Signs of life. A replica of one rank has none."""
        assert self._peers
        return self._watch

    @property
    def num_bytes_sent(self) -> int:
        return self._wire.num_bytes_sent if self._peers else 0

    @property
    def num_messages_sent(self) -> int:
        return self._wire.num_messages_sent if self._peers else 0

    # -- what all ranks do together ---------------------------------------------------------------------------------

    def gather_json(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        """A collective of the replica: each gives a value that JSON can carry, and gets all of them by local rank.

        Raises RankFailure, naming who did not come, after the timeout.
        """
        if not self._peers:
            return [json.loads(json.dumps(value))]
        self._num_collectives += 1
        number, timeout_s = self._num_collectives, timeout_s or self.timeout_s
        with self.watch.phase("waiting for ranks"):
            if not self.mesh.is_controller:
                self.send(Kind.SAYS, number, json.dumps(value).encode())
                return self._await_answers(number, timeout_s).json()
            said = self.collect(Kind.SAYS, number, self._peers, timeout_s, "did not come to a vote of the ranks")
        answers = json.dumps([value, *(said[rank].json() for rank in sorted(said))]).encode()
        self.send(Kind.ANSWERS, number, answers)
        return json.loads(answers)

    def say_how_it_stands(self, facts: Mapping[str, Any]) -> None:
        """At a follower: from now on the controller knows this of it, before it hears anything that is said later. Says
        nothing once the channel is closed, or the replica lost."""
        if not (self._is_closed or self.mesh.is_controller or self.watch.failure is not None):
            self.send(Kind.STANDS, 0, json.dumps(facts).encode())

    def how_they_stand(self) -> dict[int, dict[str, Any]]:
        """At the controller: what followers said last of how things stand on them, by local rank. Waits for nobody."""
        with self._changed:
            said = dict(self._mail.get((Kind.STANDS, 0), ()))
        return {rank: said[rank].json() for rank in sorted(said)}

    def run_everywhere(
        self, verb: str, arguments: Mapping[str, Any], timeout_s: float = VERB_TIMEOUT_S
    ) -> list[RankResult]:
        """At the controller: run `handlers[verb](**arguments)` on every rank, here too; one result each, by local rank.

        Followers run it between two steps: the caller holds the engine still (`Engine.between_steps`). What a handler
        raises is its result, and one that a rank does not have is a success with `skipped`. Raises ValueError at a
        follower, DeadlineExceeded where ranks do not follow now, RankFailure where one dies or does not answer in time.
        """
        self.check_controller(verb)
        self.await_followers(min(timeout_s, self.timeout_s), DeadlineExceeded)
        self._num_verbs += 1
        number = self._num_verbs
        if self._peers:
            self.send(Kind.VERB, number, json.dumps({"verb": verb, "arguments": dict(arguments)}).encode())
        own = self.run_verb(verb, arguments)
        if not self._peers:
            return [own]
        replies = self.collect(Kind.REPLY, number, self._peers, timeout_s, f"did not answer {verb!r}")
        return [own, *(RankResult(**replies[rank].json()) for rank in sorted(replies))]

    def run_verb(self, verb: str, arguments: Mapping[str, Any]) -> RankResult:
        """This rank's part of `run_everywhere`."""
        place = (self.mesh.rank, self.mesh.pp_rank, self.mesh.tp_rank)
        handler = self.handlers.get(verb)
        if handler is None:
            data = {"skipped": True, "unsupported": True}
            return RankResult(*place, True, f"rank {self.mesh.rank} does not support {verb!r}", data)
        if self._peers:
            self.watch.enter(f"verb {verb}")
        try:
            return RankResult(*place, True, "", handler(**arguments))
        except RankFailure:
            raise
        except Exception as error:  # a boundary between processes: the caller gets it as a result
            logger.exception("%s failed on rank %d", verb, self.mesh.rank)
            return RankResult(*place, False, str(error), None, type(error).__name__)
        finally:
            if self._peers:
                self.watch.enter("waiting for ranks")

    def check_controller(self, what: str) -> None:
        """Raises ValueError, naming the controller, anywhere else."""
        if not self.mesh.is_controller:
            first = self.mesh.plan.replica(self.mesh.rank)[0]
            raise ValueError(f"{what}: rank {self.mesh.rank} follows the controller, rank {first}: call it there")

    # -- messages ---------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, id: int = 0, payload: bytes = b"", to: Collection[int] | None = None) -> None:
        """To these local ranks, by default to the controller or to all of its followers. Returns at once.

        Raises RankFailure where the replica is lost, or a follower leaves hundreds of messages unread.
        """
        for rank in self._peers if to is None else to:
            self.check()
            if self.mesh.is_controller and self._wire.num_unread(rank) >= _NUM_UNREAD:
                self._await_room(rank)
            try:
                self._wire.send(rank, kind, id, payload)
            except RuntimeError as error:  # gloo's
                raise self._lose_peer(rank) from error

    def next_message(self) -> Message:
        """At a follower: the controller's next message, however long that takes. Raises RankFailure."""
        with self._changed:
            self._wait(lambda: bool(self._inbox), None)
            message = self._take(0)
        if self._wire.num_untold(0) >= _TELL_EVERY:
            self.send(Kind.READ)
        return message

    def collect(self, kind: Kind, id: int, ranks: list[int], timeout_s: float, blame: str) -> dict[int, Message]:
        """At the controller: what each of these local ranks sent of that kind and id. Raises RankFailure, which says
        `blame` of those who did not."""
        key = (kind, id)
        with self._changed:
            if self._wait(lambda: len(self._mail.get(key, ())) >= len(ranks), timeout_s):
                return self._mail.pop(key)
            missing = [rank for rank in ranks if rank not in self._mail.get(key, ())]
        raise self.explain(missing, f"{blame} in {timeout_s:g} s")

    def await_step(self, step: int, sampling_rank: int) -> Message:
        """At the controller: the results of a step, or the news that it failed on some rank. Raises RankFailure."""
        keys = ((Kind.STEP_FAILED, step), (Kind.RESULTS, step))
        with self._changed:
            if self._wait(lambda: any(key in self._mail for key in keys), self.timeout_s):
                found = next(self._mail.pop(key) for key in keys if key in self._mail)
                return next(iter(found.values()))
        raise self.explain([sampling_rank], f"gave no results in {self.timeout_s:g} s")

    def abandon_step(self, step: int) -> None:
        """At the controller: whatever comes of this step is dropped."""
        with self._changed:
            self._unwanted.add(step)
            for kind in (Kind.RESULTS, Kind.STEP_FAILED):
                self._mail.pop((kind, step), None)

    def await_followers(self, timeout_s: float, late: type[LockstepError] = RankFailure) -> None:
        """At the controller: return when every follower follows. Raises RankFailure, or another error and then nothing
        is lost, where some do not come in that time."""
        if len(self.present) == len(self._peers):
            if self._peers:
                self.check()
            return
        with self.watch.phase("waiting for ranks"), self._changed:
            if self._wait(lambda: len(self.present) == len(self._peers), timeout_s):
                return
            missing = [rank for rank in self._peers if rank not in self.present]
        what = f"did not come to follow in {timeout_s:g} s"
        if late is RankFailure:
            raise self.explain(missing, what)
        names = " and ".join(self.watch.describe(rank) for rank in missing)
        raise late(f"{names} {what}: in no call of the engine now")

    def are_following(self, timeout_s: float) -> bool:
        """At the controller: whether the followers follow, or else have come to the next collective by themselves;
        waits until they did one or the other. Raises RankFailure, and DeadlineExceeded where some do neither."""
        here = (Kind.SAYS, self._num_collectives + 1)
        if not self._peers:
            return False
        with self.watch.phase("waiting for ranks"), self._changed:
            if not self._wait(lambda: len(self.present) == len(self._peers) or here in self._mail, timeout_s):
                missing = [self.watch.describe(rank) for rank in self._peers if rank not in self.present]
                raise DeadlineExceeded(
                    f"{' and '.join(missing)} came neither to follow nor to the same call in {timeout_s:g} s"
                )
            return here not in self._mail

    # -- loss -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RankFailure where the replica is lost."""
        if self._peers and self.watch.failure is not None:
            raise self._error(self.watch.failure)

    def lose(self, ranks: list[int], what: str) -> RankFailure:
        """These local ranks are to blame for the loss of the replica; returns the error to raise, with its first
        cause."""
        return self._error(self.watch.post(self.watch.cause(ranks, what)))

    def explain(self, suspects: list[int], what: str) -> RankFailure:
        """This rank waited in vain; returns the error to raise (see `RankWatch.explain`)."""
        return self._error(self.watch.explain(suspects, what))

    def _error(self, cause: Cause) -> RankFailure:
        # Whoever gets this may end the process, and with it the store: the others are told before.
        self._announced.wait(_ANNOUNCE_S)
        return cause.error()

    def await_close(self) -> None:
        """At a follower: return when the controller closes the engine, or after the timeout. Drops other messages."""
        with self._changed:
            if not self._wait(lambda: 0 in self._said_goodbye, self.timeout_s):
                logger.warning("the controller did not close the engine in %g s", self.timeout_s)

    def close(self) -> None:
        """Say goodbye: afterwards another channel may use the group. The controller's followers must be following."""
        if self._is_closed or not self._peers:
            return
        if self.watch.failure is None:
            if self.mesh.is_controller:
                self.send(Kind.CLOSE)
                with self._changed:
                    if not self._wait(lambda: len(self._said_goodbye) == len(self._peers), self.timeout_s):
                        logger.warning("not every follower said goodbye in %g s", self.timeout_s)
            else:
                self.send(Kind.BYE)
        self._is_closed = True
        self.watch.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Until `ready()`; False after the timeout. The caller holds `_changed`. Raises RankFailure."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            self.check()
            left_s = self.timeout_s / 4 if end is None else min(end - time.monotonic(), self.timeout_s / 4)
            if left_s <= 0:
                return False
            if not self._changed.wait(left_s) and (cause := self.watch.silent_store()) is not None:
                raise self._error(self.watch.settle(cause))
        return True

    def _await_answers(self, number: int, timeout_s: float) -> Message:
        def place() -> int | None:
            found = (i for i, m in enumerate(self._inbox) if m.kind is Kind.ANSWERS and m.id == number)
            return next(found, None)

        with self._changed:
            # A moment longer than the controller, who knows for whom it waits.
            if self._wait(lambda: place() is not None, timeout_s + self.timeout_s / 4):
                return self._take(place() or 0)
        raise self.explain([0], f"brought no vote of the ranks to its end in {timeout_s:g} s")

    def _await_room(self, rank: int) -> None:
        with self._changed:
            if self._wait(lambda: self._wire.num_unread(rank) < _NUM_UNREAD, self.timeout_s):
                return
        raise self.explain([rank], f"left {_NUM_UNREAD} messages unread for {self.timeout_s:g} s")

    def _take(self, place: int) -> Message:
        message = self._inbox[place]
        del self._inbox[place]
        self._wire.has_read(0, message)
        return message

    def _deliver(self, rank: int, message: Message) -> bool:
        """Put a message where it is waited for; whether it was the last. Called by the wire's threads."""
        if message.kind is Kind.LOST:
            self.watch.accept(message.payload)
            return False
        with self._changed:
            if self.mesh.is_controller:
                self._file(rank, message)
            else:
                self._inbox.append(message)
            self._changed.notify_all()
        if message.kind in (Kind.CLOSE, Kind.BYE):
            self._said_goodbye.add(rank)
            with self._changed:
                self._changed.notify_all()
        return rank in self._said_goodbye

    def _file(self, rank: int, message: Message) -> None:
        self._wire.has_read(rank, message)
        if message.kind is Kind.HERE:
            self.present[rank] = message.id
            if self.watch.is_away:
                self.watch.enter(IDLE)  # they follow: from now on they miss this rank
        elif message.kind in (Kind.RESULTS, Kind.STEP_FAILED) and message.id in self._unwanted:
            self._unwanted = {step for step in self._unwanted if step >= message.id}  # results come in order
        elif message.kind not in (Kind.READ, Kind.BYE):
            self._mail.setdefault((message.kind, message.id), {})[rank] = message

    def _on_gone(self, rank: int, error: RuntimeError) -> None:
        if not (self._is_closed or rank in self._said_goodbye):
            logger.debug("the connection to local rank %d: %s", rank, error)
            self._lose_peer(rank)

    def _lose_peer(self, rank: int) -> RankFailure:
        return self.lose([rank], "has ended: its connection closed")

    def _on_failure(self, cause: Cause) -> None:
        """The replica is lost: wake whoever waits, and at the controller tell those who cannot read the store."""
        logger.error("the replica is lost: %s", cause.why)
        for rank in self._peers if self.mesh.is_controller and not self._is_closed else ():
            if self.mesh.plan.replica(self.mesh.rank)[rank] not in cause.ranks:
                try:
                    self._wire.send_out(rank, Kind.LOST, json.dumps(asdict(cause)).encode(), _ANNOUNCE_S / 4)
                except RuntimeError as error:  # it is gone too
                    logger.debug("cannot tell local rank %d: %s", rank, error)
        self._announced.set()
        with self._changed:
            self._changed.notify_all()
        for listener in self.on_loss:
            listener()
