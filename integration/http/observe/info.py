"""What the server says of itself: whether it lives, which model it serves, how much it has to do. Changes nothing."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from ....rollout.engine import Engine
from ....rollout.errors import RankFailure
from ...service import RolloutService
from ...version import version
from ..admin.common import endpoint, json_response, service_of, skipped
from ..edge.bodies import AdminBody
from ..edge.config import HttpConfig
from ..edge.errors import BadField, HttpError

router = APIRouter(tags=["information"])

_SECRETS = ("api_key", "admin_api_key")
_STARTED = time.time()
_INCLUDES = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_LOAD_GAUGES = ("num_running_reqs", "num_waiting_reqs", "token_usage", "gen_throughput", "num_used_tokens",
                "max_total_num_tokens", "cache_hit_rate")  # fmt: skip


class InfoBody(AdminBody):
    pass


# -- liveness ---------------------------------------------------------------------------------------------------------


def is_alive(app: FastAPI) -> bool:
    """Whether the loop's heart beats and the server is not ending; also while paused, released or training. Waits for
    nobody."""
    engine = app.state.service.engine
    age_s = time.monotonic() - engine.driver.heartbeat
    return not app.state.is_closing and engine.failure is None and age_s < app.state.config.stall_timeout_s


@router.get("/health", response_class=Response, responses={503: {"description": "the loop has ended"}})
@router.get("/health_generate", response_class=Response, responses={503: {"description": "the loop has ended"}})
@router.get("/ping", response_class=Response, responses={503: {"description": "the loop has ended"}})
async def health(request: Request) -> Response:
    """Whether the engine lives, by its loop's heartbeat. A replica that has lost a rank says which."""
    if is_alive(request.app):
        return Response()
    failure = service_of(request).engine.failure
    return PlainTextResponse(f"{failure}\n" if isinstance(failure, RankFailure) else "", 503)


@router.get("/ready", response_class=Response, responses={503: {"description": "not alive, or paused"}})
async def ready(request: Request) -> Response:
    """Whether a request would be served now: alive, and not paused."""
    is_ready = is_alive(request.app) and not service_of(request).engine.is_paused
    return Response(status_code=200 if is_ready else 503)


# -- model and server -------------------------------------------------------------------------------------------------


def model_path(app: FastAPI) -> str:
    """Where the weights came from last: a folder, or the name of the module's class."""
    return app.state.updated_from or first_path(app.state.service, app.state.config)


def model_name(app: FastAPI) -> str:
    """As clients of /v1 call the model; without a name of its own that is where the weights came from last."""
    return app.state.config.model_name or model_path(app)


def first_path(service: RolloutService, config: HttpConfig) -> str:
    """Where the first weights came from."""
    module = service.engine.model.module
    return config.model_path or getattr(module, "name_or_path", "") or type(module).__name__


def served_name(service: RolloutService, config: HttpConfig) -> str:
    """The model's name, as it does not change with updates."""
    return config.model_name or first_path(service, config)


async def read_state(request: Request) -> dict[str, Any]:
    """The service's state, read beside the event loop."""
    return await request.app.state.reads.run(service_of(request).state)


@endpoint(router, "/model_info", InfoBody, methods=("GET", "POST"))
@endpoint(router, "/get_model_info", InfoBody, methods=("GET", "POST"))
async def model_info(request: Request, body: InfoBody) -> Response:
    """The model, its weights' version and digest, and the engine's state in short."""
    if (skip := skipped(request, body)) is not None:
        return skip
    state, engine = await read_state(request), service_of(request).engine
    config = engine.model.config
    weights = {
        "weight_version": state["weight_version"],
        "weight_digest": state["weight_digest"],
        "model_path": model_path(request.app),
        "load_format": "auto",
    }
    scheduler = {
        "engine_paused": state["paused"],
        "pause_mode": state["pause_mode"],
        "waiting_queue_size": state["num_waiting"],
        "running_batch_size": state["num_running"],
        "tp_rank": engine.ranks.mesh.tp_rank,
        "tp_size": engine.ranks.mesh.tp,
        "pp_size": engine.ranks.mesh.pp,
        "supports_weight_update": True,
        "supports_weights_checker": True,
    }
    return json_response(
        {
            **weights,
            "success": True,
            "served_model_name": model_name(request.app),
            "tokenizer_path": getattr(engine.tokenizer, "name_or_path", None),
            "is_generation": True,
            "preferred_sampling_params": None,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": list(getattr(config, "architectures", None) or [type(engine.model.module).__name__]),
            "epoch": state["epoch"],
            **scheduler,
            "stages": [{"stage": request.app.state.config.stage, **weights, **scheduler}],
        }
    )


@router.get("/get_weight_version")
async def get_weight_version(request: Request) -> Response:
    """The version that was committed last."""
    return json_response({"weight_version": service_of(request).get_weight_version()})


@router.get("/server_info")
@router.get("/get_server_info", operation_id="get_server_info_old")
async def server_info(request: Request) -> Response:
    """Every setting under SGLang's names where it has one, and the engine's state."""
    state = await read_state(request)
    return json_response({**_settings(request.app, state), **_live(request, state)})


@router.get("/state")
async def get_state(request: Request) -> Response:
    """The whole state report: sequences, blocks, weights, groups, and a pause's lease."""
    lease, updates = request.app.state.pause_lease, request.app.state.updates
    state = await read_state(request)
    return json_response({**state, "pause_seconds_left": lease.seconds_left, "update_age_s": updates.age_s})


def _settings(app: FastAPI, state: dict[str, Any]) -> dict[str, object]:
    engine, config = app.state.service.engine, app.state.config
    mesh = engine.ranks.mesh
    capacity = state["num_blocks"] * engine.config.block_size
    ours = {
        "model_path": model_path(app),
        "served_model_name": model_name(app),
        "tokenizer_path": getattr(engine.tokenizer, "name_or_path", None),
        "host": config.host,
        "port": config.port,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        "tp_size": mesh.tp,
        "pp_size": mesh.pp,
        "ep_size": 1,
        "dp_size": 1,
        "moe_dp_size": 1,
        "num_gpus": _num_accelerators(engine),
        "mem_fraction_static": None,
        "max_total_tokens": capacity,
        "max_running_requests": engine.config.max_num_seqs,
        "chunked_prefill_size": engine.config.chunked_prefill_size,
        "page_size": engine.config.block_size,
        "context_length": engine.max_model_len,
        "random_seed": engine.config.seed,
        "schedule_policy": engine.config.policy,
        "enable_memory_saver": True,
        "enable_metrics": True,
        "enable_return_routed_experts": False,
        "disable_radix_cache": not engine.config.prefix_cache,
        "disaggregation_mode": "null",
        "disaggregation_bootstrap_port": None,
        "encoder_only": False,
        "load_format": "auto",
        "skip_server_warmup": True,
        "trust_remote_code": False,
        "engine_config": asdict(engine.config),
    }
    given = {key: value for key, value in config.extra_server_args.items() if "api_key" not in key}
    return _redacted({**ours, **given}, config)  # type: ignore[return-value]


def _num_accelerators(engine: Engine) -> int:
    return engine.ranks.mesh.num_ranks if engine.model.device.type == "cuda" else 0


def _live(request: Request, state: dict[str, Any]) -> dict[str, object]:
    engine, config = service_of(request).engine, request.app.state.config
    capacity = state["num_blocks"] * engine.config.block_size
    gib = 2.0**30
    internal = {
        **state,
        "world_size": engine.ranks.mesh.num_ranks,
        "effective_max_running_requests_per_dp": engine.config.max_num_seqs,
        "last_gen_throughput": state["last_throughput"],
        "memory_usage": {
            "weight": round(state["weight_bytes"] / gib, 3),
            "kvcache": round(state["kv_bytes"] / gib, 3),
            "token_capacity": capacity,
            "graph": 0,
        },
    }
    return {
        "status": "ready" if is_alive(request.app) else "ending",
        "launch_command": _redacted(" ".join(_without_keys(sys.argv)), config),
        "scheduler_info": {
            "status": "ready" if is_alive(request.app) else "ending",
            "max_total_num_tokens": capacity,
            "max_req_input_len": engine.max_model_len - 1,
            "startup_time": _STARTED,
        },
        "kv_events": None,
        "startup_time": _STARTED,
        "internal_states": [internal],
        "weight_version": state["weight_version"],
        "weight_digest": state["weight_digest"],
        "version": version(),
        "frontend": "python",
    }


def _without_keys(arguments: list[str]) -> list[str]:
    """A command line without what follows --api-key and --admin-api-key."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_key = name.lstrip("-").replace("-", "_") in _SECRETS
        shown.append("***" if hide else f"{name}=***" if is_key and equals else argument)
        hide = is_key and not equals
    return shown


def _redacted(value: object, config: HttpConfig) -> object:
    """The same without the keys, wherever they stand."""
    if isinstance(value, str):
        for key in (config.api_key, config.admin_api_key):
            value = value.replace(key, "***") if key else value
    elif isinstance(value, dict):
        return {name: _redacted(item, config) for name, item in value.items()}
    elif isinstance(value, list | tuple):
        return [_redacted(item, config) for item in value]
    return value


# -- /v1 --------------------------------------------------------------------------------------------------------------


def _card(app: FastAPI) -> dict[str, object]:
    return {
        "id": model_name(app),
        "object": "model",
        "created": int(_STARTED),
        "owned_by": "lockstep",
        "root": model_path(app),
        "parent": None,
        "max_model_len": app.state.service.engine.max_model_len,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_card(request.app)]})


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    """The model of that name, or 404."""
    if model != model_name(request.app):
        raise HttpError(404, f"the model {model!r} does not exist", param="model", code="model_not_found")
    return json_response(_card(request.app))


@router.get("/v1/loads")
async def loads(request: Request, include: str = "core", dp_rank: int | None = None, format: str = "json") -> Response:
    """How much the engine has to do."""
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
            "num_accelerators": _num_accelerators(service_of(request).engine),
            "loads": [load],
        }
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
