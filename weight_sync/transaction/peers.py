"""Votes of the ranks that hold one model together: an update takes effect on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import WeightSyncError

Exchange = Callable[[object], Sequence[object]]  # takes this rank's JSON value, returns all ranks' values in rank order
T = TypeVar("T")


class PeerFailed(WeightSyncError):
    """Another rank of the model failed, so no rank did its part. The message names the failed ranks and their
    reasons."""


@dataclass(frozen=True)
class Tally:
    """The combined reports of the ranks."""

    problems: Mapping[int, str] = field(default_factory=dict)  # by rank
    wrote: bool = False  # some rank has something to undo
    expired: bool = False  # on some rank the session's lease has expired
    names: frozenset[str] = frozenset()  # all names that the ranks sent
    poison: Mapping[int, str] = field(default_factory=dict)  # why the weights of a rank are poisoned, by rank
    values: Sequence[object] = ()  # by rank

    def raise_if_any(self, own: BaseException | None) -> None:
        """Raise this rank's own error, or PeerFailed where another rank has a problem."""
        listed = "; ".join(f"rank {rank}: {problem}" for rank, problem in self.problems.items())
        if own is not None:
            if len(self.problems) > 1:
                own.add_note(f"the ranks of this model report: {listed}")
            raise own
        if self.problems:
            raise PeerFailed(listed)


def error_of(action: Callable[[], object]) -> Exception | None:
    """Run the action and return the exception that it raised, so that the other ranks can be informed before it is
    raised."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - any exception: if only this rank stopped, the others would wait
        return error
    return None


class Peers:
    """One of the ranks that hold a model. A single rank decides alone and exchanges nothing.

    exchange: a collective that every rank calls equally often and in the same order; it raises where a rank does not
    answer.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1, exchange: Exchange = lambda value: [value]) -> None:
        self.rank, self.num_ranks, self._exchange = rank, num_ranks, exchange
        self.are_apart = False  # a collective has failed here: what the other ranks do next is not known
        self._agreed: BaseException | None = None  # the last error that every rank has learned of, until the next vote

    def exchange(self, value: object) -> Sequence[object]:
        """Send this rank's JSON value and return the values of all ranks, in their order. A collective."""
        with self.apart_if_it_fails():
            return self._exchange(value)

    @contextmanager
    def apart_if_it_fails(self) -> Iterator[None]:
        """Note an exception inside of a collective, which the other ranks do not learn of, or find otherwise. Those of
        `gather` are known to all of them."""
        try:
            yield
        except BaseException as error:
            self.are_apart = self.are_apart or error is not self._agreed
            raise

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    def together(self, what: str, action: Callable[[], T], undo: Callable[[], object] = lambda: None) -> T:
        """Run this rank's part of an action of all ranks, then learn whether every rank succeeded. A collective.

        undo: called where the action succeeded here and failed elsewhere. Raises the action's own exception, else
        PeerFailed, else the exchange's exception.
        """
        if self.is_alone:
            return action()
        made: list[T] = []
        with self.apart_if_it_fails():  # with what is no Exception, as at Ctrl-C
            error = error_of(lambda: made.append(action()))
        try:
            self.vote(what, error).raise_if_any(error)
        except BaseException:
            if error is None:
                undo()
            raise
        return made[0]

    def gather(self, what: str, make: Callable[[], object]) -> Sequence[object]:
        """Return the JSON value that each rank makes, by rank. A collective.

        Where one of them fails to make it all ranks stay together: raises the exception of `make`, else PeerFailed,
        else the exchange's exception.
        """
        if self.is_alone:
            return [make()]
        made: list[object] = []
        with self.apart_if_it_fails():
            error = error_of(lambda: made.append(make()))
        tally = self.vote(what, error, value=made[0] if made else None)
        try:
            tally.raise_if_any(error)
        except Exception as agreed:
            self._agreed = agreed
            raise
        return tally.values

    def vote(
        self,
        what: str,
        problem: BaseException | None = None,
        *,
        wrote: bool = False,
        expired: bool = False,
        names: Iterable[str] = (),
        poison: str | None = None,
        value: object = None,
    ) -> Tally:
        """Send this rank's result to the others and return the combined results. A collective.

        `what` must be the same on all ranks: where the ranks are at different points, every rank has a problem. Changes
        nothing.
        """
        self._agreed = None
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        ballot: dict[str, object] = {"what": what, "problem": said, "wrote": wrote, "expired": expired}
        ballot |= {"names": sorted(names), "poison": poison, "value": value}
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
            {rank: str(b["poison"]) for rank, b in enumerate(ballots) if b["poison"] is not None},
            [b["value"] for b in ballots],
        )
