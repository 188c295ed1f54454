"""Waiting requests in an order, with the first at hand: the cost of a step does not grow with their number."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Protocol

from ..sequences.request import Request

Priority = tuple[float, ...]  # smaller goes first; the last number breaks ties by arrival

_CLASSES_PER_OCTAVE = 4
_MAX_CLASSES = 64  # 16 octaves of allowances above the least one; longer allowances share the last class


class WaitingQueue(Protocol):
    """Requests that wait, each at most once."""

    def push(self, request: Request) -> None: ...

    def discard(self, request: Request) -> None:
        """Remove the request; does nothing when it is not in the queue."""
        ...

    def peek(self, now: float) -> Request | None:
        """Return the request that goes first at `now`, and keep it; None when the queue is empty."""
        ...


class OrderedQueue:
    """A queue by a key that does not change while a request waits."""

    def __init__(self, key: Callable[[Request], Priority]) -> None:
        self._key = key
        self._entries: list[tuple[Priority, int, Request]] = []  # heap; entries of removed requests are skipped
        self._numbers: dict[Request, int] = {}  # request in the queue -> the number of its entry
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, request: Request) -> None:
        assert request not in self._numbers
        self._num_pushed += 1
        self._numbers[request] = self._num_pushed
        heapq.heappush(self._entries, (self._key(request), self._num_pushed, request))

    def discard(self, request: Request) -> None:
        """Remove the request; does nothing when it is not in the queue. Constant time, on average."""
        if self._numbers.pop(request, None) is not None and len(self._entries) > 2 * len(self._numbers) + 64:
            self._entries = [entry for entry in self._entries if self._is_current(entry)]
            heapq.heapify(self._entries)

    def peek(self, now: float = 0.0) -> Request | None:
        while self._entries and not self._is_current(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def _is_current(self, entry: tuple[Priority, int, Request]) -> bool:
        return self._numbers.get(entry[2]) == entry[1]


class SlackTerms(Protocol):
    """The values of a request that a queue by relative slack uses."""

    min_deadline_s: float

    def deadline(self, request: Request) -> float: ...

    def allowance(self, request: Request) -> float: ...

    def latest_start(self, request: Request) -> float: ...

    def rank(self, request: Request, now: float) -> Priority: ...


class SlackQueue:
    """A queue by relative slack, (latest start - now) / allowance, whose order changes as time passes.

    Requests with equal allowances never change their order, so requests are put into classes of allowances within 2 **
    (1/4) of each other (the least allowance, which all short prompts have, is one class), ordered by their latest
    start. Only the heads of the classes, at most 64, and the earliest deadline are ranked afresh.
    """

    def __init__(self, terms: SlackTerms) -> None:
        self._terms = terms
        self._by_deadline = OrderedQueue(lambda r: (terms.deadline(r), r.arrival_index))
        self._classes: dict[int, OrderedQueue] = {}
        self._class_of: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    def push(self, request: Request) -> None:
        self._by_deadline.push(request)
        number = self._class_of[request] = self._class_number(request)
        if number not in self._classes:
            self._classes[number] = OrderedQueue(lambda r: (self._terms.latest_start(r), r.arrival_index))
        self._classes[number].push(request)

    def discard(self, request: Request) -> None:
        number = self._class_of.pop(request, None)
        if number is None:
            return
        self._by_deadline.discard(request)
        self._classes[number].discard(request)
        if not self._classes[number]:
            del self._classes[number]

    def peek(self, now: float) -> Request | None:
        first = self._by_deadline.peek()
        if first is None or self._terms.deadline(first) <= now:
            return first
        heads = [head for queue in self._classes.values() if (head := queue.peek()) is not None]
        return min(heads, key=lambda r: self._terms.rank(r, now))

    def _class_number(self, request: Request) -> int:
        octaves = math.log2(self._terms.allowance(request)) - math.log2(self._terms.min_deadline_s)
        return min(math.ceil(octaves * _CLASSES_PER_OCTAVE), _MAX_CLASSES - 1)
