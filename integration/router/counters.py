"""What a router has counted since it started: plain numbers, written on its event loop and read by /metrics."""

from __future__ import annotations

from collections import Counter
from enum import Enum


class Outcome(Enum):
    """How one request ended at one worker."""

    ANSWERED = "answered"  # below 400
    REFUSED = "refused"  # 4xx, passed on
    FAILED = "failed"  # 5xx, passed on
    MOVED = "moved"  # the worker produced nothing; another one may
    BROKEN = "broken"  # the worker ended in the middle of the answer
    TIMED_OUT = "timed_out"
    CLIENT_LEFT = "client_left"


class Affinity(Enum):
    """Whether a request went to a worker that knows the beginning of its prompt."""

    HIT = "hit"
    TOO_BUSY = "too_busy"  # one knows it, and had more to do than the slack allows
    UNKNOWN = "unknown"  # nobody knows it


def outcome_of(status: int) -> Outcome:
    """Of an answer that was passed on whole."""
    if status < 400:
        return Outcome.ANSWERED
    return Outcome.REFUSED if status < 500 else Outcome.FAILED


class RouterCounters:
    """The labels are few: workers that are there, our own words, and verbs that the router knows."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, Outcome]] = Counter()  # by the worker's URL
        self.affinity: Counter[Affinity] = Counter()
        self.num_retries = 0  # times a request went to one more worker
        self.unanswered: Counter[str] = Counter()  # requests that no worker answered, by the error's code
        self.broadcasts: Counter[tuple[str, str]] = Counter()  # by verb and outcome
        self.broadcast_seconds: Counter[str] = Counter()  # by verb, waiting for the change before it included

    def forget(self, url: str) -> None:
        """The worker was removed."""
        for key in [key for key in self.requests if key[0] == url]:
            del self.requests[key]

    def add_broadcast(self, verb: str, status: int, seconds: float) -> None:
        """A verb was answered for all workers."""
        outcome = "done" if status < 400 else "refused" if status < 500 else "failed"
        self.broadcasts[verb, outcome] += 1
        self.broadcast_seconds[verb] += seconds  # type: ignore[assignment]
