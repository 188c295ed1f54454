"""Ranks that hold one model together, deciding together: an update lands on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import WeightSyncError

Exchange = Callable[[object], Sequence[object]]  # a JSON value of each rank, in; those of all ranks in their order, out
T = TypeVar("T")


class PeerFailed(WeightSyncError):
    """Another rank of the model could not do its part, so that none did; the message names the ranks and why."""


@dataclass(frozen=True)
class Tally:
    """What the ranks said."""

    problems: Mapping[int, str] = field(default_factory=dict)  # by rank
    wrote: bool = False  # some rank has something to undo
    expired: bool = False  # to some rank the session's time is over
    names: frozenset[str] = frozenset()  # what any of them named

    def raise_if_any(self, own: BaseException | None) -> None:
        """Raise this rank's own error, or PeerFailed, where any rank has one."""
        listed = "; ".join(f"rank {rank}: {problem}" for rank, problem in self.problems.items())
        if own is not None:
            if len(self.problems) > 1:
                own.add_note(f"the ranks of this model said: {listed}")
            raise own
        if self.problems:
            raise PeerFailed(listed)


def error_of(action: Callable[[], object]) -> Exception | None:
    """Run the action and return the exception that it raised: other ranks have to hear of it before it is raised."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is: on one rank alone it would leave the others waiting
        return error
    return None


class Peers:
    """One of the ranks. Alone it decides by itself, and nothing is exchanged.

    exchange: a collective that every rank calls as often and in the same order; it raises where a rank does not answer.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1, exchange: Exchange = lambda value: [value]) -> None:
        self.rank, self.num_ranks, self.exchange = rank, num_ranks, exchange

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    def together(self, what: str, action: Callable[[], T], undo: Callable[[], object] = lambda: None) -> T:
        """Run this rank's part of an action of all ranks, then learn whether every rank did its part; a collective.

        undo: called where the action succeeded here and failed elsewhere. Raises the action's own exception, else
        PeerFailed, else the exchange's.
        """
        if self.is_alone:
            return action()
        made: list[T] = []
        error = error_of(lambda: made.append(action()))
        try:
            self.vote(what, error).raise_if_any(error)
        except BaseException:
            if error is None:
                undo()
            raise
        return made[0]

    def vote(
        self,
        what: str,
        problem: BaseException | None = None,
        *,
        wrote: bool = False,
        expired: bool = False,
        names: Iterable[str] = (),
    ) -> Tally:
        """Tell the others how it went here and hear how it went there; a collective. `what` must be the same on all
        ranks: where they are at different points every rank has a problem. Changes nothing."""
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        ballot = {"what": what, "problem": said, "wrote": wrote, "expired": expired, "names": sorted(names)}
        ballots: Sequence[Mapping[str, object]] = [ballot] if self.is_alone else self.exchange(ballot)  # type: ignore[assignment]
        problems = {rank: str(b["problem"]) for rank, b in enumerate(ballots) if b["problem"] is not None}
        places = [b["what"] for b in ballots]
        if len(set(places)) > 1:
            problems |= {r: f"it is at {place}, rank {self.rank} at {what}" for r, place in enumerate(places)
                         if place != what}  # fmt: skip
        return Tally(
            problems,
            any(b["wrote"] for b in ballots),
            any(b["expired"] for b in ballots),
            frozenset(name for b in ballots for name in b["names"]),  # type: ignore[attr-defined]
        )
