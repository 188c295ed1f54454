"""The order in which waiting requests are admitted, and the order in which running ones are preempted.

Each policy's guarantee to a waiting request, as long as no running sequence is computing its prefix at that moment
(then it waits for that KV, and requests with other prefixes do not):

    fcfs    it is admitted before every request that arrived later
    edf     it is admitted before every request whose deadline is later, so before all that arrive after its deadline
    lrs     it is admitted before every request that arrives after its deadline

A preempted request keeps its arrival and its deadline, so all three guarantees hold again.
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
        """Note a queued request; the first call fixes the values that never change for it."""
        ...

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...

    def rank(self, request: Request, now: float) -> Priority:
        """Return the rank of a live request at `now`, in seconds of the clock of arrival times."""
        ...

    def make_queue(self) -> WaitingQueue:
        """Create an empty queue in this order."""
        ...


def fcfs(request: Request) -> Priority:
    """Rank by arrival: first come, first served. A preempted request keeps its arrival, so it precedes later ones."""
    return (request.arrival_time, request.arrival_index)


class Fcfs:
    """First come, first served."""

    def __init__(self, predictor: PrefillTimePredictor, multiplier: float, min_deadline_s: float) -> None:
        """Accept the arguments of all policies; this one uses none."""

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

    The prediction is made when the request first arrives; the deadline never changes. Source: Medha (Agrawal et al.,
    arXiv:2409.17264).
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
        """Return the seconds from arrival to deadline; at least `min_deadline_s`, so never 0."""
        return self._allowances[request]

    def deadline(self, request: Request) -> float:
        """Return the deadline, in seconds of the clock of arrival times."""
        return request.arrival_time + self._allowances[request]

    def rank(self, request: Request, now: float) -> Priority:
        return (self.deadline(request), request.arrival_index)

    def make_queue(self) -> WaitingQueue:
        return OrderedQueue(lambda r: self.rank(r, 0.0))


class Lrs(Edf):
    """Least relative slack first; requests past their deadline precede all others, earliest deadline first.

    Relative slack = (deadline - now - predicted remaining prefill) / (deadline - arrival): long prompts, which have
    long deadlines, and short ones age at the same rate. Without the exception, a growing queue of short prompts could
    overtake long ones forever. Source: Medha, as for Edf.
    """

    def slack(self, request: Request, now: float) -> float:
        """Return the relative slack at `now`; it falls with time and rises as prefill progresses."""
        num_left = max(request.num_tokens_ahead - request.num_processed_ahead, 0)
        remaining = self.predictor.predict(num_left)
        return (self.deadline(request) - now - remaining) / self.allowance(request)

    def latest_start(self, request: Request) -> float:
        """Return the time at which its slack is used up while it waits: deadline less the prefill of all known
        tokens."""
        return self.deadline(request) - self.predictor.predict(request.num_tokens_ahead)

    def rank(self, request: Request, now: float) -> Priority:
        deadline = self.deadline(request)
        if deadline <= now:
            return (0, deadline, request.arrival_index)
        return (1, self.slack(request, now), request.arrival_index)

    def make_queue(self) -> WaitingQueue:
        return SlackQueue(self)


PolicyClass = Callable[[PrefillTimePredictor, float, float], Policy]  # multiplier and min_deadline_s, as of `Edf`

POLICIES: dict[str, PolicyClass] = {"fcfs": Fcfs, "edf": Edf, "lrs": Lrs}


def find_policy(name: str) -> PolicyClass:
    """Return the policy of that name. Raises ValueError listing the known ones."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, not {name!r}")
    return POLICIES[name]


def pick_victim(candidates: Iterable[Request], policy: Callable[[Request], Priority]) -> Request:
    """Choose the running request to preempt: lowest priority, then fewest generated tokens, then longest input.

    policy: the rank of a request; its last number, the arrival, is ignored here. Changes nothing.
    """
    return max(candidates, key=lambda r: (policy(r)[:-1], -r.sequence.num_output_tokens, r.sequence.num_prompt_tokens))
