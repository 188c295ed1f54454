"""The paths that list training runs, checkpoints and sessions, and delete checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ...http.edge.errors import HttpError
from ..training.checkpoints import CheckpointInfo, Checkpoints, RunInfo, expiry, moment, path_of
from ..training.data import BadInput
from ..wire.bodies import PathBody, TtlBody
from .served import Served, read, served_of

router = APIRouter()

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]
T = TypeVar("T")


@router.get("/training_runs")
async def training_runs(request: Request, limit: Limit = 20, offset: Offset = 0) -> dict[str, object]:
    """List training runs, the newest first."""
    served = served_of(request)

    def listed() -> dict[str, object]:
        runs = served.checkpoints.runs()
        chosen = [_run(served, one) for one in runs[offset : offset + limit]]
        return {"training_runs": chosen, "cursor": _cursor(runs, limit, offset)}

    return await _read(listed)


@router.get("/training_runs/{run_id}")
async def training_run(request: Request, run_id: str) -> dict[str, object]:
    """Describe a training run."""
    served = served_of(request)
    return await _read(lambda: _run(served, served.checkpoints.run(run_id)))


@router.get("/training_runs/{run_id}/checkpoints")
async def run_checkpoints(request: Request, run_id: str) -> dict[str, object]:
    """List the checkpoints of a run."""
    checkpoints = served_of(request).checkpoints
    return await _read(
        lambda: {"checkpoints": [one.as_json() for one in checkpoints.of_run(checkpoints.run(run_id).run_id)]}
    )


@router.get("/checkpoints")
async def all_checkpoints(request: Request, limit: Limit = 100, offset: Offset = 0) -> dict[str, object]:
    """List the checkpoints of all runs, the newest first."""
    checkpoints = served_of(request).checkpoints

    def listed() -> dict[str, object]:
        found = sorted(_all(checkpoints), key=lambda one: -one.created)
        chosen = [one.as_json() for one in found[offset : offset + limit]]
        return {"checkpoints": chosen, "cursor": _cursor(found, limit, offset)}

    return await _read(listed)


@router.delete("/training_runs/{run_id}/checkpoints/{middle}/{name}")
async def delete_checkpoint(request: Request, run_id: str, middle: str, name: str) -> Response:
    """Delete a checkpoint."""
    checkpoints = served_of(request).checkpoints
    await _read(lambda: checkpoints.delete(path_of(run_id, middle, name)))
    return Response(status_code=204)


@router.put("/training_runs/{run_id}/checkpoints/{middle}/{name}/ttl")
async def set_ttl(request: Request, run_id: str, middle: str, name: str) -> Response:
    """Set when a checkpoint expires; without a time it never does."""
    body, _ = await read(TtlBody)(request)
    checkpoints, expires_at = served_of(request).checkpoints, expiry(body.ttl_seconds)
    await _read(lambda: checkpoints.set_expiry(path_of(run_id, middle, name), expires_at))
    return Response(status_code=204)


@router.post("/weights_info")
async def weights_info(request: Request) -> dict[str, object]:
    """Describe the adapter of a checkpoint."""
    body, _ = await read(PathBody)(request)
    info = await _read(lambda: served_of(request).checkpoints.info(body.tinker_path))
    return {
        "base_model": info.base_model, "is_lora": True, "lora_rank": info.spec.rank,
        "train_unembed": info.spec.train_unembed, "train_mlp": info.spec.train_mlp,
        "train_attn": info.spec.train_attn, "optimizer_config": {"type": "adamw"},
    }  # fmt: skip


@router.get("/sessions")
async def sessions(request: Request, limit: Limit = 20, offset: Offset = 0) -> dict[str, object]:
    """List the open sessions."""
    found = [one.session_id for one in served_of(request).sessions]
    return {"sessions": found[offset : offset + limit]}


@router.get("/sessions/{session_id}")
async def session(request: Request, session_id: str) -> dict[str, object]:
    """Describe an open session."""
    found = [one for one in served_of(request).sessions if one.session_id == session_id]
    if not found:
        raise HttpError(404, f"session {session_id[:100]} is not open")
    return {
        "training_run_ids": list(found[0].models), "sampler_ids": list(found[0].samplers),
        "user_metadata": found[0].user_metadata, "display_name": found[0].display_name,
    }  # fmt: skip


def _run(served: Served, run: RunInfo) -> dict[str, object]:
    found = served.checkpoints.of_run(run.run_id)
    live = [model for one in served.sessions for model in one.models.values() if model.model_id == run.run_id]

    def last(kind: str) -> dict[str, object] | None:
        return next((one.as_json() for one in found if one.kind == kind), None)

    return {
        "training_run_id": run.run_id, "base_model": run.base_model, "model_owner": "local", "is_lora": True,
        "lora_rank": run.spec.rank, "last_request_time": moment(live[0].last_request if live else run.created),
        "last_checkpoint": last("training"), "last_sampler_checkpoint": last("sampler"),
        "user_metadata": run.user_metadata,
    }  # fmt: skip


def _all(checkpoints: Checkpoints) -> list[CheckpointInfo]:
    return [one for run in checkpoints.runs() for one in checkpoints.of_run(run.run_id)]


def _cursor(found: Sequence[object], limit: int, offset: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(found)}


async def _read(call: Callable[[], T]) -> T:
    """Call a function that reads the disk, on a thread. What is not there is a 404."""
    try:
        return await asyncio.to_thread(call)
    except BadInput as error:
        raise HttpError(404, str(error)) from None
