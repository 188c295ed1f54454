"""The metrics of a router in Prometheus' formats, read from its counters and workers at each GET /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..http.edge.metrics_format import metrics_format
from .changes.journal import UpdateJournal
from .counters import Affinity, Moved, RouterCounters
from .fleet.held import HeldRequests
from .fleet.worker import Health, Worker
from .fleet.workers import WorkerRegistry

WORKER_STATES = ("unseen", "starting", "draining", "dead", "disabled", "held", "paused", "routable")
JOURNAL_STATES = ("empty", "under_way", "unresolved")


def render(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Format the metrics for a scraper's Accept header. Returns the text and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    encode, content_type = metrics_format(accept)
    return encode(registry), content_type


class RouterCollector(Collector):
    """A collector that reads a router on its event loop. It changes nothing."""

    def __init__(
        self, registry: WorkerRegistry, counters: RouterCounters, journal: UpdateJournal, held: HeldRequests
    ) -> None:
        self._registry, self._counters, self._journal, self._held = registry, counters, journal, held

    def collect(self) -> Iterator[Metric]:
        """Collect the metrics of workers, requests, broadcasts and the journal."""
        yield from self._workers()
        yield from self._requests()
        yield from self._broadcasts()
        yield from self._update_journal()

    def _workers(self) -> Iterator[Metric]:
        workers = list(self._registry)
        states = Counter(map(_state_of, workers))
        family = GaugeMetricFamily("lockstep:router_workers", "Workers, each in one state.", labels=["state"])
        for state in WORKER_STATES:
            family.add_metric([state], states[state])
        yield family
        load = GaugeMetricFamily("lockstep:router_load", "Running sequences that this router sent.", labels=["worker"])
        deaths = CounterMetricFamily("lockstep:router_worker_deaths", "Times that it became dead.", labels=["worker"])
        for worker in workers:
            load.add_metric([worker.url], worker.num_running)
            deaths.add_metric([worker.url], worker.num_deaths)
        yield load
        yield deaths

    def _requests(self) -> Iterator[Metric]:
        counters = self._counters
        family = CounterMetricFamily(
            "lockstep:router_requests",
            "Requests sent to a worker, by outcome; a request that moves counts at each worker.",
            labels=["worker", "outcome"],
        )
        for (url, outcome), count in counters.requests.items():
            family.add_metric([url, outcome.value], count)
        yield family
        yield CounterMetricFamily(
            "lockstep:router_retries", "Times that a request was sent to another worker.", counters.num_retries
        )
        family = CounterMetricFamily(
            "lockstep:router_moved_streams", "Streams that had begun at a worker that ended.", labels=["result"]
        )
        for moved in Moved:
            family.add_metric([moved.value], counters.moves[moved])
        yield family
        family = CounterMetricFamily(
            "lockstep:router_hedged_requests", "Requests that a second worker got too.", labels=["faster"]
        )
        for is_second, name in ((False, "first"), (True, "second")):
            family.add_metric([name], counters.hedges[is_second])
        yield family
        yield GaugeMetricFamily(
            "lockstep:router_held_requests", "Requests that wait for a worker.", len(self._held)
        )  # fmt: skip
        family = CounterMetricFamily(
            "lockstep:router_unanswered_requests", "Requests that no worker answered.", labels=["reason"]
        )
        for reason, count in counters.unanswered.items():
            family.add_metric([reason], count)
        yield family
        family = CounterMetricFamily(
            "lockstep:router_affinity", "Choices of a worker, by whether it knows the prompt.", labels=["result"]
        )
        for result in Affinity:
            family.add_metric([result.value], counters.affinity[result])
        yield family

    def _broadcasts(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "lockstep:router_broadcasts", "Administrative verbs to all workers.", labels=["verb", "outcome"]
        )
        for (verb, outcome), count in self._counters.broadcasts.items():
            family.add_metric([verb, outcome], count)
        yield family
        family = CounterMetricFamily(
            "lockstep:router_broadcast_seconds", "Time of administrative verbs, with their wait for each other.",
            labels=["verb"],
        )  # fmt: skip
        for verb, seconds in self._counters.broadcast_seconds.items():
            family.add_metric([verb], seconds)
        yield family

    def _update_journal(self) -> Iterator[Metric]:
        entry = self._journal.entry
        state = "empty" if entry is None else "unresolved" if self._journal.is_unresolved else "under_way"
        family = GaugeMetricFamily("lockstep:router_journal", "1 for the journal's state.", labels=["state"])
        for one in JOURNAL_STATES:
            family.add_metric([one], one == state)
        yield family
        age_s = 0.0 if entry is None else entry.age_s
        yield GaugeMetricFamily("lockstep:router_journal_age_seconds", "Age of the update in the journal, or 0.", age_s)


def _state_of(worker: Worker) -> str:
    """Return the first reason for which a worker gets no requests, or "routable"."""
    if worker.health is not Health.ALIVE:
        return worker.health.value
    if worker.disabled:
        return "disabled"
    if worker.holds:
        return "held"
    return "paused" if worker.paused else "routable"
