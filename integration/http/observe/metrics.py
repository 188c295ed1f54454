"""GET /metrics: counters of the engine, its weights and the server, in Prometheus' formats.

The engine and the service keep plain counters, which each scrape reads. Names that start with `sglang:` have the
meaning of SGLang's metrics; the others are Lockstep's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ....rollout.reports.latencies import Histogram
from ...service import RolloutService
from ..conversations.collector import SessionsCollector
from ..conversations.store import Sessions
from ..edge.config import HttpConfig
from ..edge.metrics_format import metrics_format
from ..edge.threads import Threads
from .model_info import served_name
from .traffic import Traffic, TrafficCollector

router = APIRouter()

Key = TypeVar("Key", bound=tuple[str, ...])  # values of a counter's labels after model_name


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Report the metrics as Prometheus text, or as OpenMetrics if the scraper asks for it."""
    encode, content_type = metrics_format(request.headers.get("accept", ""))
    return Response(await request.app.state.scrapes.read(encode, content_type), media_type=content_type)


class Scrapes:
    """Scrapes of one server. The path needs no key, so all scrapers of a moment share one reading of the engine."""

    def __init__(self, service: RolloutService, config: HttpConfig, traffic: Traffic, sessions: Sessions) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        model_name = served_name(service, config)
        self._registry.register(ServiceCollector(service, model_name))
        self._registry.register(TrafficCollector(traffic, model_name))
        self._registry.register(SessionsCollector(sessions, model_name))
        self._threads = Threads(1)  # of their own: reports that need a key do not wait for scrapes
        self._running: dict[str, asyncio.Task[bytes]] = {}  # by content type

    async def read(self, encode: Callable[[CollectorRegistry], bytes], content_type: str) -> bytes:
        """Return the metrics in a format."""
        running = self._running.get(content_type)
        if running is None:
            running = asyncio.create_task(self._threads.run(lambda: encode(self._registry)))
            self._running[content_type] = running
            running.add_done_callback(lambda _: self._running.pop(content_type))
        return await asyncio.shield(running)


class ServiceCollector(Collector):
    """Read a service at each scrape. Waits for the current step, and changes no state."""

    def __init__(self, service: RolloutService, model_name: str) -> None:
        self._service = service
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """Make one family per metric, all with the label model_name."""
        state: dict[str, Any] = self._service.state()
        counted: dict[str, float] = state["metrics"]
        yield from self._requests(state, state["num_retracted"])
        yield from self._totals(state, counted)
        yield from self._drafts(state["speculation"], counted)
        yield from self._blocks(state)
        yield from self._latencies()
        yield from self._weights(state, counted)

    def _requests(self, state: Mapping[str, object], num_retracted: int) -> Iterator[Metric]:
        num_running, num_waiting = _number(state["num_running"]), _number(state["num_waiting"])
        is_paused = bool(state["paused"])
        yield self._gauge("sglang:num_running_reqs", "Sequences that hold KV blocks.", num_running)
        yield self._gauge("sglang:num_queue_reqs", "Sequences that wait for blocks.", num_waiting)
        yield self._gauge(
            "sglang:num_paused_reqs",
            "Sequences that wait for the end of a pause.",
            is_paused * (num_running + num_waiting),
        )
        yield self._gauge("sglang:num_retracted_reqs", "Sequences that gave their blocks back and wait.", num_retracted)
        throughput = 0.0 if is_paused or not num_running else _number(state["last_throughput"])
        yield self._gauge("sglang:gen_throughput", "Tokens per second of the newest step.", throughput)
        yield self._gauge("lockstep:paused", "1 while generation is paused.", is_paused)
        yield self._gauge(
            "lockstep:refusing", "1 while no step may run although the engine is not paused.", bool(state["refusal"])
        )

    def _totals(self, state: Mapping[str, object], counted: Mapping[str, float]) -> Iterator[Metric]:
        for name, what, value in (
            ("sglang:num_requests", "Sequences accepted.", counted["num_requests"]),
            ("sglang:num_aborted_requests", "Sequences that were aborted.", counted["num_aborted"]),
            ("sglang:num_retracted_requests", "Times a sequence gave its blocks back.", counted["num_retractions"]),
            ("sglang:prompt_tokens", "Prompt tokens of accepted sequences.", counted["num_prompt_tokens"]),
            (
                "sglang:generation_tokens",
                "Output tokens of sequences that were answered.",
                counted["num_output_tokens"],
            ),
            (
                "sglang:cached_tokens",
                "Prompt tokens with reused KV, of sequences that were answered.",
                counted["num_cached_tokens"],
            ),
            ("lockstep:steps", "Steps run.", counted["num_steps"]),
            ("lockstep:step_seconds", "Time that steps took.", counted["step_seconds"]),
            ("lockstep:rows", "Prefill and decode rows run.", counted["num_rows"]),
            ("lockstep:pauses", "Pauses of generation.", counted["num_pauses"]),
            ("lockstep:jump_forward_tokens", "Tokens added without sampling.", counted["num_jump_forward_tokens"]),
            ("lockstep:forwards_saved", "Steps of one sequence that jumps saved.", counted["num_forwards_saved"]),
            ("lockstep:jump_forward_rollbacks", "Jumps that replaced tokens.", counted["num_jump_rollbacks"]),
            ("lockstep:retokenisations", "Checks of tokens sampled after a jump.", counted["num_retokenisations"]),
            ("lockstep:jump_forward_seconds", "Time spent planning jumps.", counted["jump_forward_seconds"]),
            ("lockstep:verified_tokens", "Rows for tokens of earlier answers.", counted["num_verified_tokens"]),
            ("lockstep:kept_tokens", "Tokens of earlier answers that were drawn again.", counted["num_kept_tokens"]),
            (
                "lockstep:parted_tokens",
                "Tokens of earlier answers from the first one on that was not drawn again.",
                counted["num_parted_tokens"],
            ),
            ("lockstep:receipts", "Answers that were given a receipt.", counted["num_receipts"]),
            ("lockstep:receipt_seconds", "Processor time spent on receipts.", counted["receipt_seconds"]),
            ("lockstep:grammar_seconds", "Time spent on grammars in steps.", counted["grammar_seconds"]),
            (
                "lockstep:trace_failures",
                "Traces that ended because their file could not be written.",
                self._service.engine.parts.reports.trace.num_failures,
            ),
            ("lockstep:evicted_blocks", "Cached blocks evicted to make room.", _number(state["num_evicted_blocks"])),
        ):
            yield self._counter(name, what, {(): value})
        answered = {"completed": "num_finished", "aborted": "num_aborted", "ignored": "num_ignored"}
        yield self._counter(
            "lockstep:answers", "Sequences answered.", {(how,): counted[name] for how, name in answered.items()}, "how"
        )

    def _drafts(self, state: Mapping[str, Any], counted: Mapping[str, float]) -> Iterator[Metric]:
        sources: Mapping[str, Mapping[str, float]] = state["sources"]
        num_steps = sum(counts["num_drafts"] for counts in sources.values())
        num_drafted, num_accepted = counted["num_drafted_tokens"], counted["num_accepted_tokens"]
        yield self._gauge(
            "sglang:spec_accept_length", "Tokens of a sequence in a step with a draft of it, since the start.",
            1 + num_accepted / num_steps if num_steps else 0.0,
        )  # fmt: skip
        yield self._gauge(
            "sglang:spec_accept_rate", "Share of drafted tokens that were accepted, since the start.",
            num_accepted / num_drafted if num_drafted else 0.0,
        )  # fmt: skip
        for name, what, key in (
            ("lockstep:drafts", "Drafts of one sequence in one step.", "num_drafts"),
            ("lockstep:draft_tokens", "Rows run for tokens of drafts.", "num_drafted"),
            ("lockstep:accepted_draft_tokens", "Drafted tokens accepted: steps of a sequence saved.", "num_accepted"),
            ("lockstep:refused_draft_tokens", "Proposed tokens that were none, or too many.", "num_refused"),
        ):
            yield self._counter(name, what, {(source,): counts[key] for source, counts in sources.items()}, "source")
        yield self._counter(
            "lockstep:sequences_without_draft", "Sequences in steps that had no draft, by the reason.",
            {(why,): num for why, num in state["num_without"].items()}, "why",
        )  # fmt: skip
        yield self._counter(
            "lockstep:speculation_seconds", "Time spent finding drafts.", {(): counted["speculation_seconds"]}
        )
        yield self._gauge("lockstep:draft_history_bytes", "Memory of samples kept for drafts.", state["history_bytes"])

    def _blocks(self, state: Mapping[str, object]) -> Iterator[Metric]:
        num_blocks, num_held = _number(state["num_blocks"]), _number(state["num_held_blocks"])
        size = self._service.engine.config.block_size
        looked_up, hit = _number(state["num_looked_up_tokens"]), _number(state["num_hit_tokens"])
        yield self._gauge("sglang:token_usage", "Share of the KV pool that sequences hold.", num_held / num_blocks)
        yield self._gauge(
            "sglang:num_used_tokens", "Tokens of KV that sequences hold, in whole blocks.", num_held * size
        )
        yield self._gauge("sglang:max_total_num_tokens", "Capacity of the KV pool in tokens.", num_blocks * size)
        rate = hit / looked_up if looked_up else 0.0
        yield self._gauge("sglang:cache_hit_rate", "Share of looked-up tokens that were cached, since the start.", rate)
        family = GaugeMetricFamily("lockstep:kv_blocks", "Blocks of the KV pool.", labels=[*self._labels, "state"])
        for kind in ("free", "cached", "held", "pinned"):
            family.add_metric([*self._labels.values(), kind], _number(state[f"num_{kind}_blocks"]))
        yield family
        yield self._gauge(
            "lockstep:kv_pool_bytes", "Memory of the KV pool; 0 while released.", _number(state["kv_bytes"])
        )

    def _latencies(self) -> Iterator[Metric]:
        latencies = self._service.engine.parts.reports.latencies
        yield self._histogram(
            "sglang:time_to_first_token_seconds", "Time from arrival to first token.", latencies.first_token
        )
        yield self._histogram(
            "sglang:inter_token_latency_seconds", "Time between two tokens of a sequence.", latencies.inter_token
        )
        yield self._histogram(
            "sglang:e2e_request_latency_seconds",
            "Time from arrival to answer, of sequences that ended by stop or length.",
            latencies.request,
        )
        yield self._histogram("sglang:queue_time_seconds", "Time from arrival to first step.", latencies.queue)

    def _weights(self, state: Mapping[str, object], counted: Mapping[str, float]) -> Iterator[Metric]:
        weights = self._service.sessions.metrics.copy()
        family = GaugeMetricFamily(
            "sglang:weight_load_duration_seconds", "Duration of the newest update.", labels=[*self._labels, "source"]
        )
        for path, seconds in weights.last_seconds.items():
            family.add_metric([*self._labels.values(), path], seconds)
        yield family
        for name, what, values in (
            ("lockstep:weight_updates", "Updates written completely.", weights.num_updates),
            ("lockstep:weight_update_bytes", "Bytes of completely written updates.", weights.num_bytes),
            ("lockstep:weight_update_seconds", "Time of completely written updates.", weights.seconds),
        ):
            yield self._counter(name, what, {(path,): value for path, value in values.items()}, "source")
        yield self._counter(
            "lockstep:weight_failures", "Weight verbs that failed, by the error's class.", weights.num_failures,
            "operation", "reason",
        )  # fmt: skip
        yield self._counter("lockstep:weight_commits", "Versions committed.", {(): counted["num_weight_commits"]})
        verified = {(): float(weights.num_digests_verified)}
        yield self._counter(
            "lockstep:weight_digests_verified", "Tensors whose digest was found equal to the sender's.", verified
        )
        family = GaugeMetricFamily(
            "lockstep:weights_info", "1, for the current weights.", labels=[*self._labels, "version", "digest"]
        )
        family.add_metric([*self._labels.values(), str(state["weight_version"]), str(state["weight_digest"] or "")], 1)
        yield family

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, what: str, values: Mapping[Key, float], *labels: str) -> Metric:
        family = CounterMetricFamily(name, what, labels=[*self._labels, *labels])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def _histogram(self, name: str, what: str, histogram: Histogram) -> Metric:
        counts = list(accumulate(histogram.counts))
        bounds = [*map(str, histogram.bounds), "+Inf"]
        family = HistogramMetricFamily(name, what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), list(zip(bounds, counts, strict=True)), histogram.total)
        return family


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value
