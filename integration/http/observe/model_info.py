"""/model_info, /v1/models and the weight version: reports of the served model. They change no state."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from ...service import RolloutService
from ..admin.common import endpoint, json_response, service_of, skipped
from ..chat.form import names_of_forms
from ..edge.bodies import AdminBody
from ..edge.config import HttpConfig
from ..edge.errors import BadField, HttpError
from ..images.intake import ImageIntake
from .state import read_state

router = APIRouter(tags=["information"])

STARTED = time.time()


class InfoBody(AdminBody):
    """Fields of model_info."""


def model_path(app: FastAPI) -> str:
    """Return the source of the newest weights: a folder, or the name of the module's class."""
    return app.state.updated_from or first_path(app.state.service, app.state.config)


def first_path(service: RolloutService, config: HttpConfig) -> str:
    """Return the source of the first weights: a folder, or the name of the module's class."""
    module = service.engine.model.module
    return config.model_path or getattr(module, "name_or_path", "") or type(module).__name__


def served_name(service: RolloutService, config: HttpConfig) -> str:
    """Return the model's name for clients of /v1, which updates do not change: the configured one, or else that of the
    first weights' folder."""
    return config.model_name or Path(first_path(service, config)).name


def refuse_unknown_model(app: FastAPI, name: object, *, or_root: bool = False, or_adapter: bool = False) -> None:
    """Refuse a model that is not served, where the server was given a name. None is the served model, as for vLLM and
    SGLang. or_root: also the source that /v1/models shows names the base. or_adapter: the caller itself checks what
    follows the base and a colon. Raises HttpError 404, and BadField for an empty name."""
    base = app.state.config.model_name
    if isinstance(name, int | float) and not isinstance(name, bool):
        name = str(name)  # as bodies are read
    if base is None or not isinstance(name, str) or (or_adapter and name.startswith(f"{base}:")):
        return
    if not name:
        raise BadField("model", f"must not be empty: name {base!r}, or leave it out")
    cards = _cards(app)
    known = {card["id"] for card in cards} | {f"{base}:{card['id']}" for card in cards[1:]}
    if name not in known and not (or_root and name == cards[0]["root"]):
        raise _unknown_model(name)


def _unknown_model(name: str) -> HttpError:
    return HttpError(404, f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")


@endpoint(router, "/model_info", InfoBody, methods=("GET", "POST"))
@endpoint(router, "/get_model_info", InfoBody, methods=("GET", "POST"))
async def model_info(request: Request, body: InfoBody) -> Response:
    """Report the model, its weights' version and digest, and the engine's state in short."""
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
    settings = request.app.state.config
    calls, reasoning = names_of_forms(engine.tokenizer, settings.tool_call_parser, settings.reasoning_parser)
    return json_response(
        {
            **weights,
            "success": True,
            "served_model_name": served_name(service_of(request), request.app.state.config),
            "tokenizer_path": getattr(engine.tokenizer, "name_or_path", None),
            "is_generation": True,
            "preferred_sampling_params": None,
            "reasoning_parser": reasoning,
            "tool_call_parser": calls,
            "disaggregation_mode": "null",
            "has_image_understanding": ImageIntake(engine, settings).refusal is None,
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
    """Report the version that was committed last. With ?weight_digest=1, as routers ask, also the digest of the present
    weights, or null where they have none yet."""
    service = service_of(request)
    report: dict[str, object] = {"weight_version": service.get_weight_version()}
    if request.query_params.get("weight_digest") == "1":
        report["weight_digest"] = service.engine.weight_digest
    return json_response(report)


def _card(app: FastAPI) -> dict[str, object]:
    return {
        "id": served_name(app.state.service, app.state.config),
        "object": "model",
        "created": int(STARTED),
        "owned_by": "lockstep",
        "root": model_path(app),
        "parent": None,
        "max_model_len": app.state.service.engine.max_prompt_len,
    }


def _cards(app: FastAPI) -> list[dict[str, object]]:
    base = _card(app)
    adapters = app.state.service.loaded_adapters.items()
    return [base, *(base | {"id": name, "root": path, "parent": base["id"]} for name, path in adapters)]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the served model, and the adapter that is loaded into it."""
    return json_response({"object": "list", "data": _cards(request.app)})


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    """Report the served model, or 404 for another name."""
    for card in _cards(request.app):
        if card["id"] == model:
            return json_response(card)
    raise _unknown_model(model)
