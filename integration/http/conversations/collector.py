"""The metrics of sessions."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .store import ENDINGS, Sessions

_GAUGES = (
    ("lockstep:sessions_open", "Sessions of conversations that are open.", "num_open"),
    ("lockstep:session_turns", "Turns that open sessions keep.", "num_turns"),
    ("lockstep:session_bytes", "Memory of open sessions and their turns.", "num_bytes"),
)


class SessionsCollector(Collector):
    """Read the sessions at each scrape, which ends those whose time is over."""

    def __init__(self, sessions: Sessions, model_name: str) -> None:
        self._sessions, self._model_name = sessions, model_name

    def collect(self) -> Iterator[Metric]:
        """Make one family per metric, all with the label model_name."""
        counted = self._sessions.report()
        for name, what, key in _GAUGES:
            gauge = GaugeMetricFamily(name, what, labels=["model_name"])
            gauge.add_metric([self._model_name], counted[key])
            yield gauge
        opened = CounterMetricFamily("lockstep:sessions_opened", "Sessions opened.", labels=["model_name"])
        opened.add_metric([self._model_name], counted["num_opened"])
        yield opened
        ended = CounterMetricFamily("lockstep:sessions_ended", "Sessions that ended.", labels=["model_name", "why"])
        for why in ENDINGS:
            ended.add_metric([self._model_name, why], counted[f"num_{why}"])
        yield ended
