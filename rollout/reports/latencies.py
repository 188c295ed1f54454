"""Waiting times of requests: plain histograms of one engine, which the HTTP edge exports to Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field

from ..sequences.request import Request

_STEPS = (1, 2, 4, 6, 8)
# Upper bounds, seconds: 1 ms .. 8 s for one token, 1 ms .. 800 s for a whole request.
TOKEN_BOUNDS = tuple(float(f"{step}e{power}") for power in range(-3, 1) for step in _STEPS)
REQUEST_BOUNDS = tuple(float(f"{step}e{power}") for power in range(-3, 3) for step in _STEPS)


@dataclass
class Histogram:
    """Counts by upper bound. One thread writes; another reader sees at worst one observation in part."""

    bounds: tuple[float, ...]  # ascending, inclusive
    counts: list[int] = field(default_factory=list)  # one each, not cumulative, and one for values above all bounds
    total: float = 0.0  # seconds

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float, num: int = 1) -> None:
        """Count a time, `num` times."""
        self.counts[bisect_left(self.bounds, seconds)] += num
        self.total += num * seconds


@dataclass
class Latencies:
    """Waiting times since the engine was created. Written by the engine's loop only, at launch and at delivery."""

    queue: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))  # arrival to the first step
    first_token: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))  # arrival to delivery
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))  # pauses and retractions included
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))  # ended by stop or length

    def on_launch(self, request: Request) -> None:
        """Record the start of a step with rows of this request."""
        if request.first_step_time is None:
            request.first_step_time = time.monotonic()
            self.queue.observe(request.first_step_time - request.arrival_time)

    def on_tokens(self, request: Request, now: float, num_tokens: int) -> None:
        """Record the delivery of a step's tokens of this request. They share the time since the last one; those that
        come with a request's first token have none. SGLang counts in the same way. now: of time.monotonic()."""
        if request.first_token_time is None:
            request.first_token_time = now
            self.first_token.observe(now - request.arrival_time)
        else:
            assert request.last_token_time is not None
            self.inter_token.observe((now - request.last_token_time) / num_tokens, num_tokens)
        request.last_token_time = now

    def on_answer(self, request: Request) -> None:
        """Record the answer to this request."""
        if request.finish_reason is not None and request.finish_reason.type in ("stop", "length"):
            self.request.observe(time.monotonic() - request.arrival_time)
