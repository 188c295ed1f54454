"""The counters, histograms and trace of one engine, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..sequences.request import Request
from .latencies import Latencies
from .metrics import Metrics
from .trace import Trace


@dataclass(frozen=True)
class Reports:
    """The record of the events of requests. Written by the engine's loop only."""

    trace: Trace
    metrics: Metrics = field(default_factory=Metrics)
    latencies: Latencies = field(default_factory=Latencies)

    def on_queued(self, request: Request) -> None:
        """Count a request that the loop has taken up."""
        num_prompt_tokens = request.sequence.num_prompt_tokens
        self.metrics.num_requests += 1
        self.metrics.num_prompt_tokens += num_prompt_tokens
        self.trace.instant("request", id=request.id, prompt_tokens=num_prompt_tokens)

    def on_retraction(self, id: str) -> None:
        """Count a running sequence that gave its blocks back."""
        self.metrics.num_retractions += 1
        self.trace.instant("retract", id=id)

    def on_answer(self, request: Request) -> None:
        """Count a request that has ended."""
        assert request.finish_reason is not None
        metrics, kind = self.metrics, request.finish_reason.type
        metrics.num_aborted += kind == "abort"
        metrics.num_ignored += kind == "ignored"
        metrics.num_finished += kind in ("stop", "length")
        metrics.num_cached_tokens += request.num_cached_tokens
        metrics.num_output_tokens += request.sequence.num_output_tokens
        if request.earlier:
            num_kept = request.num_kept_tokens
            metrics.num_kept_tokens += num_kept
            metrics.num_parted_tokens += len(request.earlier) - num_kept
        self.latencies.on_answer(request)
        self.trace.instant("answer", id=request.id, reason=kind)
