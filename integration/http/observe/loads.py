"""GET /v1/loads: the engine's load. Changes no state."""

from __future__ import annotations

import time
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from ....rollout.engine import Engine
from ...version import version
from ..admin.common import json_response, service_of
from ..edge.errors import BadField
from .state import read_state

router = APIRouter(tags=["information"])

_INCLUDES = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_LOAD_GAUGES = ("num_running_reqs", "num_waiting_reqs", "token_usage", "gen_throughput", "num_used_tokens",
                "max_total_num_tokens", "cache_hit_rate")  # fmt: skip


@router.get("/v1/loads")
async def loads(request: Request, include: str = "core", dp_rank: int | None = None, format: str = "json") -> Response:
    """Report the engine's load: sequences, tokens, KV pool and throughput."""
    if unknown := sorted(set(include.split(",")) - set(_INCLUDES)):
        raise BadField("include", f"unknown: {', '.join(unknown)}; known: {', '.join(_INCLUDES)}")
    if dp_rank not in (None, 0):
        raise BadField("dp_rank", "this engine has rank 0 only")
    if format not in ("json", "prometheus"):
        raise BadField("format", "must be json or prometheus")
    load = _load(request, await read_state(request))
    if format == "prometheus":
        lines = [
            line
            for name in _LOAD_GAUGES
            for line in (f"# TYPE sglang:{name} gauge", f'sglang:{name}{{dp_rank="0"}} {load[name]}')
        ]
        return PlainTextResponse("\n".join(lines) + "\n")
    device = service_of(request).engine.model.device
    return json_response(
        {
            "timestamp": load["timestamp"],
            "version": version(),
            "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "num_accelerators": num_accelerators(service_of(request).engine),
            "loads": [load],
        }
    )


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """Report the engine's load as SGLang's older clients read it."""
    load = _load(request, await read_state(request))
    return json_response(
        [
            {
                "dp_rank": 0,
                "num_reqs": load["num_total_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
            }
        ]
    )


def _load(request: Request, state: dict[str, Any]) -> dict[str, Any]:
    engine = service_of(request).engine
    size, num_blocks = engine.config.block_size, state["num_blocks"]
    num_active = state["num_held_blocks"] * size
    num_used = (num_blocks - state["num_free_blocks"]) * size
    looked_up = state["num_looked_up_tokens"]
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": state["num_running"],
        "num_waiting_reqs": state["num_waiting"],
        "num_total_reqs": state["num_running"] + state["num_waiting"],
        "num_waiting_uncached_tokens": state["num_waiting_tokens"],
        "num_used_tokens": num_used,
        "num_total_tokens": num_used,
        "num_active_tokens": num_active,
        "max_total_num_tokens": num_blocks * size,
        "max_running_requests": engine.config.max_num_seqs,
        "token_usage": num_active / (num_blocks * size),
        "gen_throughput": state["last_throughput"] if state["num_running"] else 0.0,
        "cache_hit_rate": state["num_hit_tokens"] / looked_up if looked_up else 0.0,
        "utilization": state["num_running"] / engine.config.max_num_seqs,
    }


def num_accelerators(engine: Engine) -> int:
    """Return the number of GPUs that the engine's ranks use; 0 on a CPU."""
    return engine.ranks.mesh.num_ranks if engine.model.device.type == "cuda" else 0
