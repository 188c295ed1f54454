"""The counters of a router since its start: plain numbers, written on its event loop and read by /metrics."""

from __future__ import annotations

from collections import Counter
from enum import Enum


class Outcome(Enum):
    """The end of one request at one worker."""

    ANSWERED = "answered"  # below 400
    REFUSED = "refused"  # 4xx, passed on
    FAILED = "failed"  # 5xx, passed on
    MOVED = "moved"  # the worker produced nothing; another one may
    DRAINING = "draining"  # the worker refused it because it drains; another one may take it
    FULL = "full"  # the worker refused it since too much waits there, or the router had no descriptor: again later
    BROKEN = "broken"  # the worker ended in the middle of the answer
    TIMED_OUT = "timed_out"
    CLIENT_LEFT = "client_left"
    LOST = "lost"  # another worker that had the request at the same time was faster


class Moved(Enum):
    """The fate of a stream that had begun at a worker that ended."""

    MOVED = "moved"  # it went to another worker
    REFUSED = "refused"  # no worker could go on with it
    ABORTED = "aborted"  # an abort ended it before another worker had it


class Affinity(Enum):
    """Whether a request went to a worker that knows the beginning of its prompt."""

    HIT = "hit"
    TOO_BUSY = "too_busy"  # a worker knows it, and had more sequences than the slack allows
    UNKNOWN = "unknown"  # no worker knows it


def outcome_of(status: int) -> Outcome:
    """Return the outcome of a complete answer by its status."""
    if status < 400:
        return Outcome.ANSWERED
    return Outcome.REFUSED if status < 500 else Outcome.FAILED


class RouterCounters:
    """The counters of one router. They have few labels: present workers, the router's own words, and known verbs."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, Outcome]] = Counter()  # by the worker's URL
        self.affinity: Counter[Affinity] = Counter()
        self.moves: Counter[Moved] = Counter()
        self.hedges: Counter[bool] = Counter()  # requests that two workers had, by whether the second one was faster
        self.num_retries = 0  # times a request went to one more worker
        self.unanswered: Counter[str] = Counter()  # requests that no worker answered, by the error's code
        self.broadcasts: Counter[tuple[str, str]] = Counter()  # by verb and outcome
        self.broadcast_seconds: Counter[str] = Counter()  # by verb, waiting for the change before it included

    def forget(self, url: str) -> None:
        """Drop the counts of a worker that was removed."""
        for key in [key for key in self.requests if key[0] == url]:
            del self.requests[key]

    def add_broadcast(self, verb: str, status: int, seconds: float) -> None:
        """Count a verb that was answered for all workers."""
        outcome = "done" if status < 400 else "refused" if status < 500 else "failed"
        self.broadcasts[verb, outcome] += 1
        self.broadcast_seconds[verb] += seconds  # type: ignore[assignment]
