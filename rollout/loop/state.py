"""The state report of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..sequences.request import Request
from ..sequences.sequence import State
from ..speculation.speculation import OFF
from .gate import StepGate
from .parts import Parts


class Posted(Protocol):
    """The inbox of an engine."""

    def posted(self) -> list[Request]:
        """Return the requests that the loop has not taken."""


def state_report(parts: Parts, gate: StepGate, inbox: Posted) -> tuple[dict[str, object], list[Request]]:
    """Return counts, modes and versions of an engine as plain values, but for the waiting requests, and these. Changes
    nothing.

    inbox: of requests that the loop has not taken yet; they wait behind the others.
    """
    posted = inbox.posted()
    return _report(parts, gate, posted), [*parts.scheduler.waiting(), *posted]


def with_waiting(report: dict[str, object], waiting: Sequence[Request]) -> dict[str, object]:
    """Return the report with what thousands of waiting requests make long: it needs no lock."""
    return report | {
        "num_waiting": len(waiting),
        "num_retracted": sum(r.sequence.state is State.WAITING_PREEMPT for r in waiting),  # among them
        "num_waiting_tokens": sum(len(r.sequence.token_ids) for r in waiting),
        "waiting_ids": [r.id for r in waiting],
    }


def _report(parts: Parts, gate: StepGate, posted: Sequence[Request]) -> dict[str, object]:
    """Return what is reported, but for the waiting requests."""
    scheduler, ledger, model = parts.scheduler, parts.ledger, parts.model
    usage, grammars = ledger.usage, parts.grammars.cache
    metrics = parts.reports.metrics.as_dict()
    metrics["num_requests"] += len(posted)
    metrics["num_prompt_tokens"] += sum(request.sequence.num_prompt_tokens for request in posted)
    return {
        "paused": gate.pause_mode is not None,
        "pause_mode": gate.pause_mode,
        "refusal": gate.refusal,
        "holds_weights": model.holds_weights,
        "weight_bytes": model.weight_bytes,
        "num_running": scheduler.num_running,  # RUNNING and PAUSED: they hold blocks
        "running_ids": [r.id for r in scheduler.running()],
        "num_blocks": usage.num_blocks,
        "num_free_blocks": usage.num_free,
        "num_cached_blocks": usage.num_cached,
        "num_held_blocks": usage.num_held,
        "num_pinned_blocks": usage.num_pinned,
        "num_pins": len(ledger.pins),
        "num_expired_pins": ledger.pins.num_expired,
        "num_auto_unpinned": ledger.pins.num_auto_unpinned,
        "num_evicted_blocks": ledger.cache.num_evicted,
        "eviction_pressure": ledger.eviction_pressure,
        "num_looked_up_tokens": ledger.num_looked_up_tokens,
        "num_hit_tokens": ledger.num_hit_tokens,
        "kv_bytes": parts.kv_cache.num_bytes,
        **_state_pool(parts),
        "num_forwards": parts.runner.num_forwards,
        "admission_ratio": scheduler.admission_ratio,
        "weight_version": parts.sequences.weight_version,
        "weight_digest": parts.sequences.weight_digest,
        "epoch": ledger.epoch,
        "last_throughput": gate.loop.last_throughput,
        "num_grammars": len(grammars),
        "num_grammars_compiled": grammars.num_compiled,
        "grammar_compile_seconds": grammars.compile_seconds,
        "speculation": OFF if parts.speculation is None else parts.speculation.report(),
        "numerics": model.numerics.describe(),
        "trace": parts.reports.trace.report(),
        "metrics": metrics,
    }


def _state_pool(parts: Parts) -> dict[str, object]:
    """Return the sizes of the state pool: zeros for a module without recurrent layers."""
    states, plan = parts.ledger.states, parts.state_plan
    return {
        "state_bytes": parts.state_pool.num_bytes,
        "num_state_slots": plan.num_slots,
        "num_free_state_slots": states.num_free if states else 0,
        "num_state_snapshots": states.num_snapshots if states else 0,
        "max_state_snapshots": plan.num_snapshots,
        "num_evicted_snapshots": states.num_evicted if states else 0,
    }
