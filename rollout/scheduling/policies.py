"""The order in which waiting sequences are taken up, and the order in which running ones give way.

What each policy promises to a waiting request, as long as no running sequence is computing its prefix at that moment
(then it waits for that KV, which others need not):

    fcfs    it is admitted before every request that arrived later
    edf     it is admitted before every request whose deadline is later, so before all that arrive after its deadline
    lrs     it is admitted before every request that arrives after its deadline

A preempted request keeps its arrival and its deadline, so all three hold for it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ..sequences.request import Request
from .prefill_time import PrefillTimePredictor
from .waiting_queue import OrderedQueue, Priority, SlackQueue, WaitingQueue


class Policy(Protocol):
    """An order of requests. Smaller ranks go first."""

    def arrive(self, request: Request) -> None:
        """The request is queued; the first time fixes what never changes for it."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...

    def rank(self, request: Request, now: float) -> Priority:
        """Where a live request stands at `now`, in seconds of the clock that its arrival was read from."""
        ...

    def make_queue(self) -> WaitingQueue:
        """A queue in this order."""
        ...


def fcfs(request: Request) -> Priority:
    """First come, first served. A preempted request keeps its arrival, so it comes back before later ones."""
    return (request.arrival_time, request.arrival_index)


class Fcfs:
    """By arrival."""

    def __init__(self, predictor: PrefillTimePredictor, multiplier: float, min_deadline_s: float) -> None:
        """Takes what the other policies need, and needs nothing."""

    def arrive(self, request: Request) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def rank(self, request: Request, now: float) -> Priority:
        return fcfs(request)

    def make_queue(self) -> WaitingQueue:
        return OrderedQueue(fcfs)


class Edf:
    """Earliest deadline first: deadline = arrival + max(predicted prefill * multiplier, min_deadline_s).

    The prediction is the one made when the request first came; the deadline never moves.
    Source: Medha (Agrawal et al., arXiv:2409.17264).
    """

    def __init__(self, predictor: PrefillTimePredictor, multiplier: float, min_deadline_s: float) -> None:
        assert multiplier > 0 and min_deadline_s > 0
        self.predictor = predictor
        self.multiplier = multiplier
        self.min_deadline_s = min_deadline_s
        self._allowances: dict[Request, float] = {}

    def arrive(self, request: Request) -> None:
        if request not in self._allowances:
            predicted = self.predictor.predict(request.sequence.num_tokens)
            self._allowances[request] = max(predicted * self.multiplier, self.min_deadline_s)

    def forget(self, request: Request) -> None:
        self._allowances.pop(request, None)

    def allowance(self, request: Request) -> float:
        """Seconds from arrival to deadline; at least `min_deadline_s`, so never 0."""
        return self._allowances[request]

    def deadline(self, request: Request) -> float:
        """Seconds of the clock that arrivals were read from."""
        return request.arrival_time + self._allowances[request]

    def rank(self, request: Request, now: float) -> Priority:
        return (self.deadline(request), request.arrival_index)

    def make_queue(self) -> WaitingQueue:
        return OrderedQueue(lambda r: self.rank(r, 0.0))


class Lrs(Edf):
    """Least relative slack first, and before all of them whoever is past its deadline, earliest deadline first.

    Relative slack = (deadline - now - predicted remaining prefill) / (deadline - arrival): long prompts, which were
    given long deadlines, and short ones age at the same rate. Without the exception long ones could be overtaken for
    ever while a queue of short ones grows. Source: Medha, as for Edf.
    """

    def slack(self, request: Request, now: float) -> float:
        """Relative slack at `now`; it falls with time and rises as prefill progresses."""
        num_left = max(request.num_tokens_ahead - request.num_processed_ahead, 0)
        remaining = self.predictor.predict(num_left)
        return (self.deadline(request) - now - remaining) / self.allowance(request)

    def latest_start(self, request: Request) -> float:
        """When its slack is used up while it waits: deadline less the prefill of everything known."""
        return self.deadline(request) - self.predictor.predict(request.num_tokens_ahead)

    def rank(self, request: Request, now: float) -> Priority:
        deadline = self.deadline(request)
        if deadline <= now:
            return (0, deadline, request.arrival_index)
        return (1, self.slack(request, now), request.arrival_index)

    def make_queue(self) -> WaitingQueue:
        return SlackQueue(self)


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "edf": Edf, "lrs": Lrs}


def find_policy(name: str) -> type[Policy]:
    """The policy of that name. Raises ValueError listing the known ones."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, not {name!r}")
    return POLICIES[name]


def pick_victim(candidates: Iterable[Request], policy: Callable[[Request], Priority]) -> Request:
    """Which running request gives its blocks back: lowest policy priority, then fewest generated tokens, then longest
    input. Changes nothing.

    policy: the rank of a request, whose last number, that of its arrival, does not count here.
    """
    return max(candidates, key=lambda r: (policy(r)[:-1], -r.sequence.num_output_tokens, r.sequence.num_prompt_tokens))
