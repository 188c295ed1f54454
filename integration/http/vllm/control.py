"""vLLM's calls that pause, sleep and abort, onto the engine's own.

| vLLM's mode of a pause | here |
|---|---|
| abort | "abort": running and waiting requests end with what they have |
| wait | "retract", once the requests that were there have ended; those that come meanwhile keep their tokens |
| keep | "retract": requests keep their tokens, and compute their KV anew, under new weights too |

The reply names the engine's mode. Sleeping is a pause, and from level 1 on the KV pool's memory is released; at level 2
the weights' as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from ....rollout.completion import FinishReason
from ....rollout.engine import Engine
from ....rollout.loop.commands import PauseMode
from ...service_config import MEMORY_TAGS
from ..admin.common import json_response, service_of
from ..edge.bodies import MAX_TIMEOUT_S, Body, describe, fields_of, read_as
from ..edge.disconnect import unless_gone
from ..edge.early_aborts import note_abort
from ..edge.errors import BadField, HttpError

router = APIRouter(tags=["control"])

_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "retract", "keep": "retract"}
_TAGS = {0: (), 1: ("kv_cache",), 2: MEMORY_TAGS}  # whose memory a level of sleep releases
T = TypeVar("T")


class AbortAllBody(Body):
    """Fields of POST /abort_requests."""

    request_ids: list[str] | None = None


class ResetBody(Body):
    """Fields of POST /reset_prefix_cache."""

    reset_running_requests: bool = False


@router.post("/pause", response_class=Response)
async def pause(
    request: Request,
    mode: str = "abort",
    clear_cache: bool = True,
    ttl: Annotated[float | None, Query(gt=0, le=MAX_TIMEOUT_S)] = None,
    keeps_other: bool = False,
    client: str | None = None,
) -> Response:
    """Run no more steps until /resume; the body is not read. clear_cache changes nothing: a commit of new weights
    starts the cache anew. Lockstep's own are ttl, keeps_other and client: seconds after which generation continues by
    itself, whether a pause that there is already keeps its own, and the name of the caller."""
    engine_mode = await _pause(request, mode, ttl, keeps_other, client)
    return json_response({"status": "paused", "mode": mode, "engine_mode": engine_mode})


@router.post("/resume", response_class=Response)
async def resume(request: Request, client: str | None = None) -> Response:
    """End a pause. client, Lockstep's own: only one that this caller has begun."""
    service = service_of(request)
    await _run(request, lambda: service.continue_in_turn(client=client))
    return json_response({"status": "resumed"})


@router.get("/is_paused", response_class=Response)
async def is_paused(request: Request) -> Response:
    """Report whether the engine is paused."""
    return json_response({"is_paused": service_of(request).engine.is_paused})


@router.post("/abort_requests", openapi_extra=describe(AbortAllBody), response_class=Response)
async def abort_requests(request: Request) -> Response:
    """Abort the named requests, or all; they are answered with what they have."""
    body = await read_as(request, lambda values: fields_of(AbortAllBody, values))
    engine, reason = service_of(request).engine, FinishReason("abort", message="aborted by abort_requests")
    rids: list[str | None] = [*body.request_ids] if body.request_ids else [None]
    for rid in rids:
        note_abort(request.app, rid, reason)

    def abort() -> int:
        if not body.request_ids:
            return len(engine.abort_request(abort_all=True, finished_reason=reason).aborted)
        return sum(len(engine.abort_request(id, finished_reason=reason).aborted) for id in body.request_ids)

    return json_response({"status": "aborted", "aborted": await _run(request, abort)})


@router.post("/reset_prefix_cache", openapi_extra=describe(ResetBody), response_class=Response)
async def reset_prefix_cache(request: Request, reset_running_requests: bool = False) -> Response:
    """Empty the prefix cache. reset_running_requests, in the query or as SkyRL's clients send it in the body: those
    that run give their KV back first, and compute it anew."""
    body = await read_as(request, lambda values: fields_of(ResetBody, values))
    engine, retracts = service_of(request).engine, reset_running_requests or body.reset_running_requests
    report = await _run(request, lambda: engine.flush_cache(retracts=retracts))
    return json_response({"success": report.success})


@router.get("/get_world_size", response_class=Response)
async def get_world_size(request: Request, include_dp: bool = True) -> Response:
    """Report the number of ranks that hold the model. An engine has no data-parallel ranks."""
    return json_response({"world_size": service_of(request).engine.ranks.mesh.num_ranks})


@router.get("/weight_info", response_class=Response)
async def weight_info(request: Request) -> Response:
    """Report the version that was committed last."""
    return json_response({"weight_version": service_of(request).get_weight_version()})


@router.post("/sleep", response_class=Response)
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> Response:
    """Pause, and release memory: at level 1 the KV pool's, at level 2 the weights' too, which have to be written
    before generation goes on."""
    if level not in _TAGS:
        raise BadField("level", f"must be 0, 1 or 2, not {level}")
    await _pause(request, mode)
    service = service_of(request)
    if level:
        await _run(request, lambda: service.release_memory_occupation(_TAGS[level]))
    request.app.state.is_asleep = True
    return json_response({"status": "sleeping", "level": level})


@router.post("/release_kv_cache_memory", response_class=Response)
async def release_kv_cache_memory(request: Request) -> Response:
    """Release the KV pool's memory, until /wake_up. Refused while sequences hold KV: pause before."""
    service = service_of(request)
    await _run(request, lambda: service.release_memory_occupation(("kv_cache",)))
    return json_response({"status": "kv_cache_released"})


@router.post("/wake_up", response_class=Response)
async def wake_up(request: Request) -> Response:
    """Allocate the memory behind the given tags, all by default. Once all of it is there the pause ends; where the
    weights hold nothing since, requests wait until an update has written them."""
    service = service_of(request)
    tags = request.query_params.getlist("tags") or None

    def wake() -> bool:
        service.resume_memory_occupation(tags)
        engine = service.engine
        is_awake = bool(engine.kv_bytes) and engine.model.holds_weights
        if is_awake and service.sessions.loss is None:
            service.continue_in_turn()
        elif is_awake:  # what holds requests until the weights are written is not the pause
            with service.pause_lease.changing():
                engine.continue_generation()
        return is_awake

    is_awake = await _run(request, wake)
    if is_awake:
        request.app.state.is_asleep = False
    return json_response({"status": "awake" if is_awake else "sleeping", "tags": tags})


@router.get("/is_sleeping", response_class=Response)
async def is_sleeping(request: Request) -> Response:
    """Report whether the engine sleeps."""
    return json_response({"is_sleeping": request.app.state.is_asleep})


async def _pause(
    request: Request, mode: str, ttl: float | None = None, keeps_other: bool = False, client: str | None = None
) -> PauseMode:
    """Pause in one of vLLM's modes; returns the engine's. Raises BadField for another mode."""
    if mode not in _MODES:
        raise BadField("mode", f"must be one of {', '.join(_MODES)}, not {mode[:100]!r}")
    service = service_of(request)
    if _MODES[mode] == "abort":
        note_abort(request.app, None)

    has_left = threading.Event()

    def begin() -> None:
        num_continued = service.num_continued

        def is_off() -> bool:
            return has_left.is_set() or service.num_continued != num_continued

        if mode == "wait" and not service.engine.is_paused:
            _wait_for_running(service.engine, is_off)
            if is_off():
                raise HttpError(409, "generation was continued before the pause began", code="continued")
        service.pause_generation(_MODES[mode], ttl=ttl, keeps_other=keeps_other, client=client)

    try:
        # not on the threads of other calls, which may be what ends the wait
        await unless_gone(request, request.app.state.waits.run(begin) if mode == "wait" else _run(request, begin))
    except ClientDisconnect:
        has_left.set()  # none would end the pause
        raise
    return _MODES[mode]


def _wait_for_running(engine: Engine, is_off: Callable[[], bool]) -> None:
    """Return when the requests that are here now have ended, `is_off`, or generation was paused by another call."""
    present = {view.id for view in engine.live_sequences(num_newest=0)}
    queued, posted = engine.parts.sequences, engine.driver.inbox

    def have_ended() -> bool:
        present.difference_update([id for id in present if id not in queued and id not in posted])
        return engine.is_paused or is_off() or not present

    engine.driver.wait_until(have_ended)


async def _run(request: Request, call: Callable[[], T]) -> T:
    """Run a call on a thread of the administrative ones."""
    return await request.app.state.operations.run(request.scope["path"], lambda _: call())
