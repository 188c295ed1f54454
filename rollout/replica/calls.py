"""Calls that all ranks of a replica make together: who is in one, how it ends, and what everybody is given."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields

from ..completion import Completion, FinishReason, NextToken, WeightSpan
from ..errors import RankFailure
from ..ranks.channel import RankChannel
from ..ranks.controller_channel import as_controller
from ..ranks.remote_errors import error_bytes, error_from
from ..ranks.watch import AWAY
from ..ranks.wire import Kind
from ..running.runner import Runner
from .controller import ReplicaRunner
from .follower import IN_A_CALL, SERVING, End, Follower
from .result_bytes import as_tuples

logger = logging.getLogger(__name__)


class RankCalls:
    """The calls of one engine. A replica of one rank has none, and everything here does nothing."""

    def __init__(self, ranks: RankChannel, runner: Runner) -> None:
        self._ranks = ranks
        self._follower: Follower | None = None
        if not ranks.mesh.is_controller:
            assert isinstance(runner, ReplicaRunner)
            self._follower = Follower(ranks, runner.stage)

    @contextmanager
    def call(self, quiet: Callable[[], object]) -> Iterator[Callable[[list[Completion]], None]]:
        """At the controller: a call begins when every follower follows, and ends with what the yielded function was
        given, or with what is raised in here, on the followers that are in the same call.

        quiet: ends what is under way, so that nobody leaves while another still needs it. Raises RankFailure.
        """
        if self._ranks.mesh.num_ranks == 1:
            yield lambda completions: None
            return
        as_controller(self._ranks).await_followers(self._ranks.timeout_s)
        given: list[Completion] = []
        try:
            yield given.extend
        except RankFailure:
            raise  # the followers know it by themselves
        except BaseException as error:
            quiet()
            self._end(IN_A_CALL, b"E" + error_bytes(error))
            raise
        quiet()
        self._end(IN_A_CALL, b"C" + completions_bytes(given))

    def join(self) -> list[Completion]:
        """At a follower: follow until the controller's call ends; its completions. Raises what ended it there."""
        assert self._follower is not None
        end, message = self._follower.follow(IN_A_CALL)
        if end == "closed":
            return []
        if message.payload[:1] == b"E":
            raise error_from(message.payload[1:], "the controller")
        return completions_from(message.payload[1:])

    def follow(self) -> End:
        """At a follower: follow until it is dismissed, or the engine is closed. Raises ValueError at the controller."""
        if self._follower is None:
            raise ValueError(f"rank {self._ranks.mesh.rank} is the controller of its replica: it does not follow")
        return self._follower.follow(SERVING)[0]

    def dismiss(self) -> None:
        """At the controller: whoever serves may do something else."""
        if self._ranks.mesh.num_ranks == 1:
            return
        self._end(SERVING, b"C" + completions_bytes([]))

    def close(self) -> None:
        """The engine is closed: the controller's followers leave."""
        try:
            if self._follower is not None:
                self._follower.close()
            else:
                self._ranks.close()
        except RankFailure as failure:
            logger.warning("closing, though the replica is lost: %s", failure)

    def _end(self, how: int, payload: bytes) -> None:
        ranks = as_controller(self._ranks)
        leaving = [rank for rank, its_how in ranks.present.items() if its_how == how]
        for rank in leaving:
            del ranks.present[rank]
        ranks.send(Kind.CALL_OVER, 0, payload, leaving)
        if not ranks.present:
            ranks.watch.enter(AWAY)


def completions_bytes(completions: list[Completion]) -> bytes:
    """Completions as JSON: every number comes back as it is."""
    return json.dumps([asdict(completion) for completion in completions], separators=(",", ":")).encode()


def completions_from(data: bytes) -> list[Completion]:
    """The other end."""
    return [_completion(given) for given in json.loads(data)]


def _completion(given: dict) -> Completion:
    values = {f.name: as_tuples(given[f.name]) for f in fields(Completion)}
    for name, kind in (("finish_reason", FinishReason), ("next_token", NextToken)):
        if given[name] is not None:
            values[name] = kind(**{key: as_tuples(value) for key, value in given[name].items()})
    values["weight_versions"] = tuple(WeightSpan(**span) for span in given["weight_versions"])
    return Completion(**values)
