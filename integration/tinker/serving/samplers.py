"""The paths that create samplers, and draw samples."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from ..training.data import BadInput
from ..training.trainer import BASE, SamplerWeights, weights_at
from ..wire.bodies import SampleBody, SamplerBody, SamplingSessionBody
from .sampling import SampleRequest
from .served import read, served_of

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> dict[str, object]:
    """Create a sampler of the base model, or of a checkpoint."""
    body, _ = await read(SamplingSessionBody)(request)
    served = served_of(request)
    if body.base_model is not None:
        served.check_base(body.base_model)
    elif body.model_path is None:
        raise BadInput("create_sampling_session needs base_model or model_path")
    weights = SamplerWeights(BASE)
    if body.model_path is not None:
        weights = weights_at(await asyncio.to_thread(served.checkpoints.info, body.model_path))
    session = served.sessions.get(body.session_id)
    sampler = served.sessions.add_sampler(session, body.sampling_session_seq_id, weights)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request) -> dict[str, object]:
    """Give a further client of a sampler a number of its own."""
    body, _ = await read(SamplerBody)(request)
    sessions = served_of(request).sessions
    return {
        "type": "join_sampling_session",
        "client_counter": sessions.join(sessions.sampler(body.sampling_session_id)),
    }


@router.post("/asample")
async def asample(request: Request) -> dict[str, object]:
    """Draw samples of a prompt. Answers with the id of the request, and one of each sample."""
    body, digest = await read(SampleBody)(request)
    served = served_of(request)
    if body.sampling_session_id is None or body.seq_id is None:
        raise BadInput("asample needs sampling_session_id and seq_id")
    sampler = served.sessions.sampler(body.sampling_session_id)
    checked = SampleRequest.of(body, served.max_model_len)
    promise = served.sessions.sample(sampler, body.seq_id, digest, checked)
    ids = [f"{promise.request_id}:{index}" for index in range(body.num_samples)]
    return {"request_id": promise.request_id, "sample_sequence_ids": ids}


@router.get("/samplers/{sampler_id}")
async def get_sampler(request: Request, sampler_id: str) -> dict[str, object]:
    """Describe a sampler."""
    served = served_of(request)
    sampler = served.sessions.sampler(sampler_id)
    return {
        "sampler_id": sampler_id, "base_model": served.config.model_name, "model_path": sampler.weights.path,
        "weight_version": sampler.weights.version,
    }  # fmt: skip
