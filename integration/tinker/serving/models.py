"""The paths that create models, train them, and save and load their weights. Each answers with the id of its request,
by which the client fetches the answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from ...http.edge.bodies import off_loop
from ...http.edge.errors import HttpError
from ..training.adapter import AdamParams
from ..training.data import BadInput, Datum
from ..training.targets import AdapterSpec
from ..training.trainer import SaveOptions, Trainer
from ..wire.bodies import (
    CreateModelBody,
    LoadBody,
    ModelBody,
    OptimizerBody,
    OptimStepBody,
    PassBody,
    SaveBody,
)
from ..wire.json_forms import data_of, pass_values
from ..wire.messages import call_of, pass_output, pass_request
from ..wire.protobuf import BadMessage
from .calls import CallRoute, note_call, read_call
from .promises import PROTO, Answer, as_json
from .served import Served, read, read_bytes, served_of
from .sessions import Beside, Run

_QUICK_BYTES = 1 << 13  # a message up to this length is parsed on the event loop

router = APIRouter(route_class=CallRoute)


@router.post("/create_model")
async def create_model(request: Request) -> dict[str, object]:
    """Create a model: an adapter on the base model."""
    body, digest = await read(CreateModelBody)(request)
    served = served_of(request)
    served.check_base(body.base_model)
    if (lora := body.lora_config) is None:
        raise BadInput("lora_config is needed: this server trains adapters, not whole models")
    _check_optimizer(body.optimizer_config)
    spec = AdapterSpec(lora.rank, lora.train_mlp, lora.train_attn, lora.train_unembed)
    spec.check(served.config.max_lora_rank)
    session = served.sessions.get(body.session_id)
    model_id, metadata = f"{session.session_id}:train:{body.model_seq_id}", _texts(body.user_metadata)

    def run(trainer: Trainer) -> Answer:
        trainer.create(model_id, spec, lora.seed, metadata)
        return as_json({"model_id": model_id, "type": "create_model"})

    model, promise = served.sessions.create_model(session, body.model_seq_id, digest, spec, run)
    return {"request_id": promise.request_id, "model_id": model.model_id}


@router.post("/get_info")
async def get_info(request: Request) -> dict[str, object]:
    """Describe a model."""
    body, _ = await read(ModelBody)(request)
    served = served_of(request)
    model, name = served.sessions.model(body.model_id), served.config.model_name
    return {
        "type": "get_info", "model_id": model.model_id, "is_lora": True, "lora_rank": model.spec.rank,
        "model_name": name, "model_data": {"arch": "lora", "model_name": name, "tokenizer_id": name},
        "optimizer_config": {"type": "adamw"},
    }  # fmt: skip


@router.post("/unload_model")
async def unload_model(request: Request) -> dict[str, object]:
    """Drop a model."""
    body, _ = await read(ModelBody)(request)
    promise = served_of(request).sessions.unload(body.model_id)
    return {"request_id": promise.request_id, "model_id": body.model_id}


@router.post("/forward_backward")
async def forward_backward(request: Request) -> dict[str, object]:
    """Run data forward and, unless `forward_only`, backward. The body is a ForwardBackwardRequest, or JSON."""
    if not request.headers.get("content-type", "").startswith(PROTO):
        return await _pass_in_json(request, backward=True)
    data, digest = await read_bytes(request)
    # Its data are parsed when they run, but a body of nothing else than small fields takes long by itself.
    try:
        parsed = pass_request(data) if len(data) <= _QUICK_BYTES else await off_loop(partial(pass_request, data))
    except BadMessage:
        note_call(request, *call_of(data[:_QUICK_BYTES]), digest)
        raise
    call = _Pass(parsed.model_id, parsed.data, parsed.loss_fn, parsed.loss_fn_config, not parsed.forward_only)
    return _submit(served_of(request), call.model_id, parsed.seq_id, digest, call.run, call.runs_beside)


@router.post("/forward")
async def forward(request: Request) -> dict[str, object]:
    """Run data forward, as SDKs before 0.30 ask for it."""
    return await _pass_in_json(request, backward=False)


async def _pass_in_json(request: Request, *, backward: bool) -> dict[str, object]:
    body, digest = await read_call(PassBody)(request)
    given = body.forward_backward_input if backward else body.forward_input
    if given is None:
        raise BadInput(f"{'forward_backward_input' if backward else 'forward_input'} is missing")
    call = _Pass(body.model_id, partial(data_of, given.data), given.loss_fn, given.loss_fn_config or {}, backward)
    return _submit(served_of(request), call.model_id, body.seq_id, digest, call.run, call.runs_beside)


@dataclass(frozen=True)
class _Pass:
    """A forward pass, or forward and backward, of one request."""

    model_id: str
    data: Callable[[], list[Datum]]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    backward: bool

    def run(self, trainer: Trainer) -> Answer:
        """Run it."""
        data = self.data()
        result = trainer.run_pass(self.model_id, data, self.loss_fn, self.loss_fn_config, backward=self.backward)
        encoded = pass_output(result.outputs, result.metrics)
        return Answer(encoded, PROTO, in_json=partial(pass_values, result.outputs, result.metrics))

    def runs_beside(self, trainer: Trainer) -> bool:
        """Return whether it can run between the steps of samples."""
        return trainer.runs_beside_samples(self.model_id)


@router.post("/optim_step")
async def optim_step(request: Request) -> dict[str, object]:
    """Update a model's weights by its gradients."""
    body, digest = await read_call(OptimStepBody)(request)

    def run(trainer: Trainer) -> Answer:
        if body.optimizer_params is not None:
            raise BadInput("optimizer_params are of another optimizer than AdamW, which is the only one here")
        params = (
            AdamParams() if body.adam_params is None else AdamParams(**body.adam_params.model_dump(exclude={"type"}))
        )
        return as_json({"metrics": trainer.step(body.model_id, params)})

    return _submit(served_of(request), body.model_id, body.seq_id, digest, run)


@router.post("/save_weights")
async def save_weights(request: Request) -> dict[str, object]:
    """Save a model's weights and its optimizer's state."""
    body, digest = await read_call(SaveBody)(request)

    def run(trainer: Trainer) -> Answer:
        path = trainer.save(body.model_id, body.path or f"{body.seq_id or 0:06d}", _options(body))
        return as_json({"path": path, "type": "save_weights"})

    return _submit(served_of(request), body.model_id, body.seq_id, digest, run)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request) -> dict[str, object]:
    """Save a model's weights for sampling: by name on disk, or in memory for a sampler of this session."""
    body, digest = await read_call(SaveBody)(request)
    served = served_of(request)
    sessions, number = served.sessions, body.sampling_session_seq_id
    sampler_id = f"{body.model_id.partition(':')[0]}:sample:{number}"

    def run(trainer: Trainer) -> Answer:
        if body.kind != "snapshot":
            raise BadInput(
                f"kind={body.kind!r} is not supported: samples would depend on when weights arrive. Use kind='snapshot'"
            )
        if (body.path is None) == (number is None):
            raise BadInput("save_weights_for_sampler needs path or sampling_session_seq_id, and not both")
        saved = {"path": None, "sampling_session_id": None, "type": "save_weights_for_sampler"}
        if body.path is not None:
            return as_json(saved | {"path": trainer.save_for_sampler(body.model_id, body.path, _options(body))})
        trainer.snapshot(body.model_id, sampler_id)
        return as_json(saved | {"sampling_session_id": sampler_id})

    if body.path is not None or number is None or body.kind != "snapshot":
        return _submit(served, body.model_id, body.seq_id, digest, run)
    session = sessions.get(body.model_id.partition(":")[0])
    saved_by = digest if body.seq_id is not None else os.urandom(16)  # without a number none is the same again
    sessions.check_sampler(session, number, None, saved_by)
    queued = _submit(served, body.model_id, body.seq_id, digest, run)
    sessions.add_sampler(session, number, None, saved_by)  # only then: one that is refused now may be tried again
    return queued


@router.post("/load_weights")
async def load_weights(request: Request) -> dict[str, object]:
    """Load a checkpoint into a model, or create a model from one."""
    body, digest = await read_call(LoadBody)(request)
    served = served_of(request)
    if body.base_model is not None:
        served.check_base(body.base_model)
    if (body.session_id is None) == (body.model_id is None):
        raise BadInput("load_weights needs model_id, or session_id with model_seq_id")
    if body.session_id is None:
        assert body.model_id is not None
        return _submit(served, body.model_id, body.seq_id, digest, _loading(body, body.model_id))
    if body.model_seq_id is None:
        raise BadInput("load_weights with session_id needs model_seq_id")
    _check_optimizer(body.optimizer_config)
    session = served.sessions.get(body.session_id)
    model_id, metadata = f"{session.session_id}:train:{body.model_seq_id}", _texts(body.user_metadata)
    spec = (await asyncio.to_thread(served.checkpoints.info, body.path)).spec

    def run(trainer: Trainer) -> Answer:
        trainer.create_from(model_id, body.path, body.optimizer, metadata)
        return as_json({"path": body.path, "model_id": model_id, "type": "load_weights"})

    model, promise = served.sessions.create_model(session, body.model_seq_id, digest, spec, run)
    return {"request_id": promise.request_id, "model_id": model.model_id}


@router.post("/save_weights_external")
async def save_weights_external(request: Request) -> dict[str, object]:
    """Refuse the call, since checkpoints are PEFT's folders already."""
    body, digest = await read_call(SaveBody)(request)

    def run(trainer: Trainer) -> Answer:
        folder = trainer.checkpoints.folder
        raise BadInput(f"save_weights_external is not supported: checkpoints are adapter folders of PEFT in {folder}")

    return _submit(served_of(request), body.model_id, body.seq_id, digest, run)


@router.post("/create_custom_loss")
@router.post("/copy_weights")
async def not_supported(request: Request) -> dict[str, object]:
    """Refuse, by name."""
    await read_bytes(request)
    raise HttpError(400, f"{request.scope['path']} is not supported by this server")


def _submit(
    served: Served, model_id: str, seq_id: int | None, digest: bytes, run: Run, runs_beside: Beside = lambda _: True
) -> dict[str, object]:
    """Queue a call of a model. What is wrong with it otherwise is its answer: its seq_id is used all the same."""
    model = served.sessions.model(model_id)
    if seq_id is not None and seq_id < 1:
        raise BadInput(f"seq_id must be 1 or more, not {seq_id}")
    promise = served.sessions.submit(model, seq_id, digest, run, runs_beside)
    return {"request_id": promise.request_id, "model_id": model_id}


def _loading(body: LoadBody, model_id: str) -> Run:
    def run(trainer: Trainer) -> Answer:
        trainer.load(model_id, body.path, body.optimizer)
        return as_json({"path": body.path, "model_id": model_id, "type": "load_weights"})

    return run


def _options(body: SaveBody) -> SaveOptions:
    return SaveOptions(body.ttl_seconds, body.overwrite, body.user_metadata)


def _check_optimizer(config: OptimizerBody | None) -> None:
    if config is not None and config.type != "adamw":
        raise BadInput(f"optimizer_config: {config.type[:100]!r} is not supported; this server has adamw")


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
