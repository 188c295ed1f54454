"""The ranks that hold a service's model together: a verb that is called on one of them runs on all.

There are two ways. In a job whose ranks run the same program every rank calls the verb itself. Where the other ranks
follow the controller (`Engine.follow`, or inside a call of `generate`) the controller's call runs it on all of them.
Either way each rank runs the same code, and the ranks vote inside it: the verb takes effect on all of them or on none.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ...rollout.engine import Engine
from ...rollout.errors import NotIdle
from ...rollout.ranks.controller_channel import ControllerChannel
from ...rollout.ranks.follower_channel import FollowerChannel
from ...weight_sync.transaction.peers import PeerFailed, Peers
from ..plain_values import plain

_NUM_WAITS = 4  # longest number of waits in one verb, for other ranks or its sender, each with its own deadline
_LONGEST_S = threading.TIMEOUT_MAX / (2 * _NUM_WAITS)  # that a rank can wait for another
P = ParamSpec("P")
T = TypeVar("T")


class Replica:
    """The ranks of one engine. A single rank runs each verb directly."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        """Connect to the engine's ranks. timeout_s: how long ranks wait for each other while they may be receiving, in
        calls that have no time of their own."""
        self._engine, self._ranks = engine, engine.ranks
        self._timeout_s = timeout_s
        mesh = engine.ranks.mesh
        self.peers = Peers(mesh.local_rank, mesh.num_ranks, self._exchange)
        self.how_it_stands: Callable[[], dict[str, object]] = dict  # returns the state of this rank for the other ranks
        self._said: dict[str, object] = {}
        # .in_verb: this thread runs a verb for all ranks; .results: the results of a verb that it ran on all ranks;
        # .is_outside: its verbs are called on this rank alone; .timeout_s: the time of the call that it runs, if any
        self._here = threading.local()

    @property
    def is_alone(self) -> bool:
        return self.peers.is_alone

    @property
    def local_rank(self) -> int:
        return self.peers.rank

    @contextmanager
    def waiting(self, timeout_s: object) -> Iterator[None]:
        """Let the ranks wait for each other in the block as long as a call with this `timeout_s` may take on one of
        them. None: the call has no time of its own, but perhaps the call around it."""
        before = getattr(self._here, "timeout_s", None)
        self._here.timeout_s = before if timeout_s is None else timeout_s
        try:
            yield
        finally:
            self._here.timeout_s = before

    def _wait_s(self, timeout_s: object) -> float:
        """Return how long ranks wait for each other in a call of this time: a moment longer than the slowest needs."""
        given = timeout_s if isinstance(timeout_s, int | float) and timeout_s > self._timeout_s else self._timeout_s
        return min(max(given + self._ranks.timeout_s / 4, self._ranks.timeout_s), _LONGEST_S)

    def _exchange(self, value: object) -> list[Any]:
        return self._ranks.gather_json(value, timeout_s=self._wait_s(getattr(self._here, "timeout_s", None)))

    @property
    def asks_followers(self) -> bool:
        """Whether a verb that is called here must be run on the other ranks too, because they follow this one and do
        not call it themselves. Waits until they follow or call it. Raises ForkedProcess in a forked child."""
        self._engine.driver.process.check()
        ranks = self._ranks
        if self.is_alone or getattr(self._here, "in_verb", False) or not isinstance(ranks, ControllerChannel):
            return False
        return ranks.are_following(ranks.timeout_s, or_calling=not getattr(self._here, "is_outside", False))

    def note_outside_call(self) -> None:
        """Note that this thread runs a call from outside of the job's program, which the other ranks do not make: if
        they wait in a vote of the ranks, it is another call's. Drops the results of earlier calls."""
        self._here.is_outside = True
        self.take_results()

    def take_results(self) -> list[dict[str, object]]:
        """Return each rank's result of the first verb that this thread ran on all ranks since the last call of this
        method. Returns an empty list where there was none."""
        results, self._here.results = getattr(self._here, "results", []), []
        return results

    def stands(self) -> None:
        """Send this rank's state to the controller if it has changed."""
        if isinstance(self._ranks, FollowerChannel) and (facts := self.how_it_stands()) != self._said:
            self._said = facts
            self._ranks.say_how_it_stands(facts)

    def states(self) -> list[dict[str, object]]:
        """Return the state of each rank, by local rank: the present state of this rank, the last reported state of the
        others. A follower knows only its own state. Does not wait."""
        mesh, told = self._ranks.mesh, {}
        if isinstance(self._ranks, ControllerChannel):
            told = self._ranks.how_they_stand()
        found = []
        for rank, world_rank in enumerate(mesh.plan.replica(mesh.rank)):
            coords = mesh.plan.coords(world_rank)
            said = self.how_it_stands() if rank == mesh.local_rank else told.get(rank, {})
            if said or mesh.is_controller:
                found.append({"rank": world_rank, "tp_rank": coords.tp, "pp_rank": coords.pp, **said})
        return found

    def serve(self, verb: str, run: Callable[..., object]) -> None:
        """Let other ranks run this verb here, with JSON arguments by name."""

        def handle(**arguments: object) -> object:
            was_in_verb, self._here.in_verb = getattr(self._here, "in_verb", False), True
            try:
                value = run(**arguments)
            except Exception as error:
                self._here.error = error
                raise
            finally:
                self._here.in_verb = was_in_verb
            self._here.value = value
            return plain(value)

        self._ranks.handlers[verb] = handle

    def ask(self, verb: str, arguments: Mapping[str, object]) -> Any:
        """Run a verb on all ranks, with no step in flight, and return its result on this rank.

        Raises this rank's exception, else PeerFailed naming the ranks where it failed; RankFailure where one is lost.
        """
        here = self._here
        here.error = here.value = None
        values = {name: plain(value) for name, value in arguments.items()}
        longest_s = _NUM_WAITS * self._wait_s(arguments.get("timeout_s"))
        found = self._engine.between_steps(verb, lambda: self._ranks.run_everywhere(verb, values, longest_s))
        here.results = getattr(here, "results", None) or [result.as_dict() for result in found]
        failures = {result.rank: f"{result.error}: {result.message}" for result in found if not result.success}
        if here.error is not None:
            raise here.error
        if failures:
            raise PeerFailed("; ".join(f"rank {rank}: {why}" for rank, why in failures.items()))
        return here.value

    def require_idle(self, what: str, why: str = "") -> None:
        """Raise NotIdle, with `why` before its message, on every rank where sequences hold KV blocks, PeerFailed on the
        others. A collective."""

        def check() -> None:
            if num_running := self._engine.num_running:
                raise NotIdle(f"{why}{num_running} running: finish, retract or abort them first")

        self.peers.together(what, check)

    def gather(self, value: object) -> list[Any]:
        """Return every rank's JSON value, by local rank. A collective."""
        return [value] if self.is_alone else list(self.peers.exchange(value))

    def gather_made(self, what: str, make: Callable[[], object]) -> list[Any]:
        """Return the JSON value that each rank makes, by local rank. A collective. Raises as `Peers.gather`, where one
        of them fails to make it."""
        return list(self.peers.gather(what, make))


class OfAReplica(Protocol):
    """An object whose verbs run on all ranks."""

    replica: Replica


def on_all_ranks(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """Mark a verb that the controller also runs on its followers. Its arguments must then be JSON values. Its
    `timeout_s`, where it has one, is also the ranks' time for each other (`Replica.waiting`)."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run(self: OfAReplica, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.replica.asks_followers:
            try:
                with self.replica.waiting(kwargs.get("timeout_s")):
                    return method(self, *args, **kwargs)
            finally:
                self.replica.stands()
        arguments = signature.bind(self, *args, **kwargs).arguments
        return self.replica.ask(method.__name__, dict(list(arguments.items())[1:]))

    run.runs_on_all_ranks = True  # type: ignore[attr-defined]
    return run


def serve_verbs(verbs: OfAReplica) -> None:
    """Let other ranks run every method that `on_all_ranks` marks."""
    for name, method in inspect.getmembers(verbs, inspect.ismethod):
        if getattr(method, "runs_on_all_ranks", False):
            verbs.replica.serve(name, method)
