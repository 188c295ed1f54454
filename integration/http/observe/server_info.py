"""GET /server_info: every setting and the engine's state, without the keys. Changes no state."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from ....rollout.errors import LockstepError
from ....rollout.receipt import guarantee
from ...version import version
from ..admin.common import json_response, service_of
from ..edge.config import HttpConfig
from .health import is_alive
from .loads import num_accelerators
from .model_info import STARTED, model_path, served_name
from .state import read_state

router = APIRouter(tags=["information"])

logger = logging.getLogger(__name__)

_SECRETS = ("api_key", "admin_api_key")


@router.get("/server_info")
@router.get("/get_server_info", operation_id="get_server_info_old")
async def server_info(request: Request) -> Response:
    """Report the engine's state and every setting, under SGLang's name if SGLang has the setting. With ?name_weights=1,
    as routers ask, a digest of the weights is begun where they have none; a later call reports it."""
    if request.query_params.get("name_weights") == "1":
        _begin_to_name_weights(request.app)
    state = await read_state(request)
    return json_response({**_settings(request.app, state), **_live(request, state)})


def _begin_to_name_weights(app: FastAPI) -> None:
    """Compute the digest of weights that have none, in a thread."""
    service, naming = app.state.service, getattr(app.state, "naming", None)
    if service.engine.weight_digest is not None or (naming is not None and not naming.done()):
        return

    def name() -> None:
        try:
            service.name_weights()
        except LockstepError as error:
            logger.warning("the weights get no digest: %s", error)

    app.state.naming = asyncio.get_running_loop().run_in_executor(None, name)


def _settings(app: FastAPI, state: dict[str, Any]) -> dict[str, object]:
    engine, config = app.state.service.engine, app.state.config
    mesh = engine.ranks.mesh
    capacity = state["num_blocks"] * engine.config.block_size
    ours = {
        "model_path": model_path(app),
        "served_model_name": served_name(app.state.service, app.state.config),
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
        "num_gpus": num_accelerators(engine),
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
    return {name: _redacted(value, config) for name, value in {**ours, **given}.items()}


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
        "status": _status(request.app),
        "launch_command": _redacted(" ".join(_without_keys(sys.argv)), config),
        "scheduler_info": {
            "status": _status(request.app),
            "max_total_num_tokens": capacity,
            "max_req_input_len": min(engine.max_model_len - 1, engine.max_prompt_len),
            "startup_time": STARTED,
        },
        "kv_events": None,
        "startup_time": STARTED,
        "internal_states": [internal],
        "weight_version": state["weight_version"],
        "weight_digest": state["weight_digest"],
        "guarantee": guarantee(engine.model),
        "version": version(),
        "frontend": "python",
    }


def _status(app: FastAPI) -> str:
    return "ending" if not is_alive(app) else "draining" if app.state.is_draining else "ready"


def _without_keys(arguments: list[str]) -> list[str]:
    """Hide the values of --api-key and --admin-api-key in a command line."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_key = name.lstrip("-").replace("-", "_") in _SECRETS
        shown.append("***" if hide else f"{name}=***" if is_key and equals else argument)
        hide = is_key and not equals
    return shown


def _redacted(value: object, config: HttpConfig) -> object:
    """Hide the keys in every text of a value."""
    if isinstance(value, str):
        for key in (config.api_key, config.admin_api_key):
            value = value.replace(key, "***") if key else value
    elif isinstance(value, dict):
        return {name: _redacted(item, config) for name, item in value.items()}
    elif isinstance(value, list | tuple):
        return [_redacted(item, config) for item in value]
    return value
