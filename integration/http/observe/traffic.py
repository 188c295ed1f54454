"""Counters of HTTP traffic for GET /metrics: answers by path, method and status, and the time of each path.

The application's own routes bound the number of labels: a path is the template of its route, and an unknown path or
method is "other". Only the event loop's thread writes the counters; a scrape reads them from another thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....rollout.reports.latencies import REQUEST_BOUNDS, Histogram

OTHER = "other"
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"})


@dataclass
class Traffic:
    """Counters since the application was made."""

    answers: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # path, method, status
    seconds: dict[str, Histogram] = field(default_factory=dict)  # by path: from the request to its answer's last byte
    num_open: int = 0  # being answered now

    def add(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.answers[path, method if method in _METHODS else OTHER, str(status)] += 1
        self.seconds.setdefault(path, Histogram(REQUEST_BOUNDS)).observe(seconds)


class TrafficMiddleware:
    """Count every request except scrapes, also requests that other middleware answers."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/metrics":  # a scrape must not change the counters
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500  # an exception becomes a 500 outside of this middleware

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._traffic.num_open += 1
        try:
            await self._app(scope, receive, watched)
        finally:
            self._traffic.num_open -= 1
            self._traffic.add(_template(scope), scope["method"], status, time.perf_counter() - began)


def _template(scope: Scope) -> str:
    """Return the path of the route that answers, or that would have answered a request that was refused earlier."""
    route = scope.get("route")
    if route is None:
        known = scope["app"].state.plain_paths
        return scope["path"] if scope["path"] in known else OTHER
    return getattr(route, "path_format", OTHER)


class TrafficCollector(Collector):
    """Read the traffic at each scrape; changes no state."""

    def __init__(self, traffic: Traffic, model_name: str) -> None:
        self._traffic = traffic
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Make three families, all with the label model_name."""
        answers = CounterMetricFamily(
            "lockstep:http_requests", "Requests answered.", labels=["model_name", "path", "method", "status"]
        )
        for key, count in sorted(self._traffic.answers.copy().items()):
            answers.add_metric([self._model_name, *key], count)
        yield answers
        seconds = HistogramMetricFamily(
            "lockstep:http_request_seconds",
            "Time from a request's head to the last byte of its answer.",
            labels=["model_name", "path"],
        )
        for path, histogram in sorted(self._traffic.seconds.copy().items()):
            counts = zip([*map(str, histogram.bounds), "+Inf"], accumulate(histogram.counts), strict=True)
            seconds.add_metric([self._model_name, path], list(counts), histogram.total)
        yield seconds
        being_answered = GaugeMetricFamily(
            "lockstep:http_requests_open", "Requests that are being answered.", labels=["model_name"]
        )
        being_answered.add_metric([self._model_name], self._traffic.num_open)
        yield being_answered
