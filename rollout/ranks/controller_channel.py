"""The controller's side of the channel: it sends to the followers of the replica and collects their answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..errors import DeadlineExceeded, LockstepError, RankFailure
from .channel import ANNOUNCE_S, RankChannel
from .mesh import Mesh
from .remote_verbs import VERB_TIMEOUT_S, RankResult, question_bytes, result_from
from .watch import AWAY, IDLE, Cause
from .wire import Kind, Message

logger = logging.getLogger(__name__)

_NUM_UNREAD = 256  # messages that a follower has not read, before the controller waits for it


class ControllerChannel(RankChannel):
    """The controller's side. In a replica of one rank it has no followers, and every call returns at once."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.present: dict[int, int] = {}  # the ranks that follow now, each with its mode (the id of its HERE)
        self._mail: dict[tuple[Kind, int], dict[int, Message]] = {}  # by kind and id, then by sender
        self._unwanted: set[int] = set()  # steps whose results are dropped
        self._ends: dict[tuple[int, int], bytes] = {}  # by rank and mode: of calls that ended before the rank came
        self._num_verbs = 0
        super().__init__(mesh, timeout_s)

    # -- collectives ------------------------------------------------------------------------------------------------

    def gather_json(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Gather a value from every rank (see `RankChannel.gather_json`)."""
        if not self._peers:
            return [json.loads(json.dumps(value))]
        self._num_collectives += 1
        number, timeout_s = self._num_collectives, timeout_s or self.timeout_s
        with self.watch.phase("waiting for ranks"):
            said = self.collect(Kind.SAYS, number, self._peers, timeout_s, "did not come to a vote of the ranks")
        answers = json.dumps([value, *(said[rank].json() for rank in sorted(said))]).encode()
        self.send(Kind.ANSWERS, number, answers)
        return json.loads(answers)

    def run_everywhere(
        self, verb: str, arguments: Mapping[str, Any], timeout_s: float = VERB_TIMEOUT_S
    ) -> list[RankResult]:
        """Run a verb on every rank (see `RankChannel.run_everywhere`)."""
        self.await_followers(min(timeout_s, self.timeout_s), DeadlineExceeded)
        self._num_verbs += 1
        number = self._num_verbs
        if not self._peers:
            return [self._run_verb(verb, arguments)]
        self.send(Kind.VERB, number, question_bytes(verb, arguments))
        own = self._run_verb(verb, arguments)
        replies = self.collect(Kind.REPLY, number, self._peers, timeout_s, f"did not answer {verb!r}")
        return [own, *(result_from(replies[rank].payload) for rank in sorted(replies))]

    # -- followers --------------------------------------------------------------------------------------------------

    def await_followers(self, timeout_s: float, late: type[LockstepError] = RankFailure) -> None:
        """Wait until every follower follows. Raises RankFailure if some do not in that time.

        With another class `late`, raises that instead, and the replica is not lost.
        """
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

    def end_call(self, mode: int, payload: bytes, *, of_all: bool = False) -> None:
        """End the call of the followers that follow in this mode; with `of_all` also of those that do not follow in it
        now, as soon as they do."""
        with self._changed:
            leaving = [rank for rank, its_mode in self.present.items() if its_mode == mode]
            for rank in leaving:
                del self.present[rank]
            self._ends |= {(rank, mode): payload for rank in self._peers if of_all and rank not in leaving}
        self.send(Kind.CALL_OVER, 0, payload, leaving)
        if not self.present:
            self.watch.enter(AWAY)

    def are_following(self, timeout_s: float, *, or_calling: bool = True) -> bool:
        """Wait until the followers follow or, with `or_calling`, take part in the next collective. Returns whether they
        follow.

        Raises RankFailure, and DeadlineExceeded if some do neither.
        """
        here = (Kind.SAYS, self._num_collectives + 1)
        if not self._peers:
            return False

        def is_calling() -> bool:
            return or_calling and here in self._mail

        with self.watch.phase("waiting for ranks"), self._changed:
            if not self._wait(lambda: len(self.present) == len(self._peers) or is_calling(), timeout_s):
                missing = [self.watch.describe(rank) for rank in self._peers if rank not in self.present]
                raise DeadlineExceeded(
                    f"{' and '.join(missing)} came neither to follow nor to the same call in {timeout_s:g} s"
                )
            return not is_calling()

    def how_they_stand(self) -> dict[int, dict[str, Any]]:
        """Return the status that each follower sent last, by local rank. Does not wait."""
        with self._changed:
            said = dict(self._mail.get((Kind.STANDS, 0), ()))
        return {rank: said[rank].json() for rank in sorted(said)}

    # -- messages ---------------------------------------------------------------------------------------------------

    def collect(self, kind: Kind, id: int, ranks: list[int], timeout_s: float, blame: str) -> dict[int, Message]:
        """Wait for the message of that kind and id from each of these local ranks.

        Raises RankFailure that names the ranks without a message. blame: the predicate of its sentence.
        """
        key = (kind, id)
        with self._changed:
            if self._wait(lambda: len(self._mail.get(key, ())) >= len(ranks), timeout_s):
                return self._mail.pop(key)
            missing = [rank for rank in ranks if rank not in self._mail.get(key, ())]
        raise self.explain(missing, f"{blame} in {timeout_s:g} s")

    def await_step(self, step: int, sampling_rank: int) -> Message:
        """Wait for the results of a step, or for the report that it failed on some rank. Raises RankFailure."""
        keys = ((Kind.STEP_FAILED, step), (Kind.RESULTS, step))
        with self._changed:
            if self._wait(lambda: any(key in self._mail for key in keys), self.timeout_s):
                found = next(self._mail.pop(key) for key in keys if key in self._mail)
                return next(iter(found.values()))
        raise self.explain([sampling_rank], f"gave no results in {self.timeout_s:g} s")

    def abandon_step(self, step: int) -> None:
        """Drop the results of this step, received or still to come."""
        with self._changed:
            self._unwanted.add(step)
            for kind in (Kind.RESULTS, Kind.STEP_FAILED):
                self._mail.pop((kind, step), None)

    def _before_send(self, rank: int) -> None:
        if self._wire.num_unread(rank) < _NUM_UNREAD:
            return
        with self._changed:
            if self._wait(lambda: self._wire.num_unread(rank) < _NUM_UNREAD, self.timeout_s):
                return
        raise self.explain([rank], f"left {_NUM_UNREAD} messages unread for {self.timeout_s:g} s")

    def _take_in(self, rank: int, message: Message) -> None:
        self._wire.has_read(rank, message)
        if message.kind is Kind.HERE and (ended := self._ends.pop((rank, message.id), None)) is not None:
            self._wire.send(rank, Kind.CALL_OVER, 0, ended)
        elif message.kind is Kind.HERE:
            self.present[rank] = message.id
            if self.watch.is_away:
                self.watch.enter(IDLE)  # the followers wait for this rank from now on
        elif message.kind in (Kind.RESULTS, Kind.STEP_FAILED) and message.id in self._unwanted:
            self._unwanted = {step for step in self._unwanted if step >= message.id}  # results arrive in order
        elif message.kind not in (Kind.READ, Kind.BYE):
            self._mail.setdefault((message.kind, message.id), {})[rank] = message

    # -- loss and the end -------------------------------------------------------------------------------------------

    def _tell_of_loss(self, cause: Cause) -> None:
        world_ranks = self.mesh.plan.replica(self.mesh.rank)
        for rank in () if self._is_closed else self._peers:
            if world_ranks[rank] not in cause.ranks:
                try:
                    self._wire.send_out([rank], Kind.LOST, 0, json.dumps(asdict(cause)).encode(), ANNOUNCE_S / 4)
                except RuntimeError as error:  # it has ended too
                    logger.debug("cannot tell local rank %d: %s", rank, error)

    def _say_goodbye(self) -> bool:
        self.send(Kind.CLOSE)
        with self._changed:
            have_all_left = self._wait(lambda: len(self._said_goodbye) == len(self._peers), self.timeout_s)
        if not have_all_left:
            logger.warning("not every follower said goodbye in %g s", self.timeout_s)
            self.send(Kind.END, 0)
            return False
        try:  # a group that is destroyed drops what has not left it
            self._wire.send_out(self._peers, Kind.END, 1, b"", self.timeout_s)
        except RuntimeError as error:
            logger.debug("a follower has ended: %s", error)
            return False
        return True


def as_controller(channel: RankChannel) -> ControllerChannel:
    """Return the channel as the controller's side. The caller knows that this rank is the controller."""
    assert isinstance(channel, ControllerChannel)
    return channel
