"""Endpoints that pause, continue, abort and flush."""

from __future__ import annotations

import math
import time
from typing import Annotated

import torch
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from ....rollout.completion import FinishReason
from ....rollout.loop.commands import AbortReport, ContinueReport, FlushReport, PauseReport, check_pause
from ..edge.bodies import MAX_TIMEOUT_S, AdminBody, Timeout
from ..edge.disconnect import unless_gone
from ..edge.early_aborts import note_abort
from ..edge.errors import BadField
from .common import endpoint, json_response, run, service_of, skipped

router = APIRouter(tags=["control"])


class PauseBody(AdminBody):
    """Fields of pause_generation."""

    mode: str = "abort"
    ttl: Timeout | None = Field(None, description="seconds after which generation continues by itself")


class ContinueBody(AdminBody):
    """Fields of continue_generation."""

    torch_empty_cache: bool = True


class AbortBody(AdminBody):
    """Fields of abort_request."""

    rid: str = ""
    abort_all: bool = False
    abort_message: Annotated[str, Field(max_length=4096)] | None = None
    finished_reason: object = None


class FlushBody(AdminBody):
    """Fields of flush_cache."""


@endpoint(router, "/pause_generation", PauseBody, carries_data=False)
async def pause_generation(request: Request, body: PauseBody) -> Response:
    """Run no more steps until continue_generation; the pause has begun when this answers."""
    try:
        check_pause(body.mode)
    except ValueError as error:
        raise BadField("mode", str(error)) from None
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    if body.mode == "abort":
        note_abort(request.app, None)

    def pause(seconds_left: float | None) -> PauseReport:
        return service.pause_generation(body.mode, ttl=body.ttl, timeout_s=seconds_left)  # type: ignore[arg-type]

    report = await run(request, body, pause)
    return json_response(
        {
            "message": "Generation paused successfully.",
            "status": "ok",
            "success": True,
            "mode": report.mode,
            "engine_paused": True,
            "num_paused_requests": report.num_running + report.num_waiting,
            "ttl": body.ttl,
            "report": report,
        }
    )


@endpoint(router, "/continue_generation", ContinueBody, carries_data=False)
async def continue_generation(request: Request, body: ContinueBody) -> Response:
    """End a pause, and commit the weights of an update without a session; allowed also when nothing is paused."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)

    def resume(seconds_left: float | None) -> ContinueReport:
        if body.torch_empty_cache and service.engine.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return service.continue_in_turn(seconds_left)

    report = await run(request, body, resume)
    return json_response(
        {
            "message": "Generation continued successfully.",
            "status": "ok",
            "success": True,
            "engine_paused": False,
            "report": report,
        }
    )


@endpoint(router, "/abort_request", AbortBody, carries_data=False)
async def abort_request(request: Request, body: AbortBody) -> Response:
    """End one live request, or all, with the output so far; an id that is not live is ignored. The answer is empty."""
    if (body.rid or body.abort_all) and skipped(request, body) is None:
        engine, reason = service_of(request).engine, _reason(body)
        note_abort(request.app, None if body.abort_all else body.rid, reason)

        def abort(seconds_left: float | None) -> AbortReport:
            return engine.abort_request(
                body.rid or None, abort_all=body.abort_all, finished_reason=reason, timeout_s=seconds_left
            )

        await run(request, body, abort)
    return Response()


@endpoint(router, "/flush_cache", FlushBody, methods=("GET", "POST"), carries_data=False)
async def flush_cache(request: Request, body: FlushBody) -> Response:
    """Empty the prefix cache. `?timeout=`: seconds to wait until the engine is idle; the wait ends with its client.
    The answer is text."""
    timeout_s, state = _flush_timeout(request), request.app.state
    if skipped(request, body) is not None:
        return PlainTextResponse("skipped: this stage was not selected\n")
    engine, began = service_of(request).engine, time.monotonic()

    def flush(seconds_left: float | None) -> FlushReport:
        return engine.flush_cache(timeout_s=seconds_left)

    report = await run(request, body, flush)
    if not report.success and timeout_s:
        left = timeout_s - (time.monotonic() - began)
        report = await unless_gone(request, state.flushes.wait(left)) or report
    if report.success:
        pinned = f", {report.num_unpinned} of them pinned" if report.num_unpinned else ""
        return PlainTextResponse(f"Cache flushed: {report.flushed_items} blocks{pinned}.\n")
    why = "Timed out waiting for idle state." if timeout_s else "Flush cache failed."
    return PlainTextResponse(f"{why} {report.error_msg}\n", 400)


def _flush_timeout(request: Request) -> float:
    text = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise BadField("timeout", f"must be a number of seconds from 0 to {MAX_TIMEOUT_S:g}")
    return timeout_s


def _reason(body: AbortBody) -> FinishReason:
    message = body.abort_message
    if message is None and isinstance(body.finished_reason, dict):
        given = body.finished_reason.get("message")
        message = given if isinstance(given, str) else None
    return FinishReason("abort", message=message or "Aborted")
