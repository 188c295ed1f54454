"""The format of a page of metrics, as its scraper asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

Encode = Callable[[CollectorRegistry], bytes]


def metrics_format(accept: str) -> tuple[Encode, str]:
    """Return the encoder of a format and its content type: OpenMetrics 1.0.0 where the Accept header names it, else
    Prometheus' text. Both write names with a colon as they are, where the library's own choice replaces it."""
    kinds = [part.split(";")[0].strip() for part in accept.split(",")]
    if "application/openmetrics-text" in kinds:
        return partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest, CONTENT_TYPE_PLAIN_0_0_4
