"""GET /health, /ping and /ready: checks that the engine is alive and serves requests. They change no state."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from ....rollout.errors import RankFailure
from ..admin.common import service_of

router = APIRouter(tags=["information"])

Handler = Callable[[Request], Awaitable[Response]]


def _check(path: str, unhealthy: str) -> Callable[[Handler], Handler]:
    """Answer GET and HEAD on the path. unhealthy: what the status 503 means."""

    def register(handler: Handler) -> Handler:
        router.head(path, include_in_schema=False)(handler)
        return router.get(path, response_class=Response, responses={503: {"description": unhealthy}})(handler)

    return register


def is_alive(app: FastAPI) -> bool:
    """Return whether the loop's heartbeat is recent and the server is not ending; True also while the engine is paused,
    released or training. Does not block."""
    engine = app.state.service.engine
    age_s = time.monotonic() - engine.driver.heartbeat
    return not app.state.is_closing and engine.failure is None and age_s < app.state.config.stall_timeout_s


@_check("/health_generate", "as /health, draining, or without weights")
@_check("/ping", "as /health, draining, or without weights")
async def health_generate(request: Request) -> Response:
    """Check that the engine is alive and takes requests, also while it is paused. Where the weights hold nothing
    the answer says so."""
    if request.app.state.is_draining:
        return _draining()
    if (loss := service_of(request).sessions.loss) is not None:
        return PlainTextResponse(f"{loss}\n", 503)
    return await health(request)


@_check("/health", "the loop has ended")
async def health(request: Request) -> Response:
    """Check that the engine is alive, by its loop's heartbeat. A replica that has lost a rank answers which."""
    if is_alive(request.app):
        return Response()
    failure = service_of(request).engine.failure
    return PlainTextResponse(f"{failure}\n" if isinstance(failure, RankFailure) else "", 503)


@_check("/ready", "not alive, paused, or draining")
async def ready(request: Request) -> Response:
    """Check that a request would be served now: alive, not paused, and not draining."""
    if request.app.state.is_draining:
        return _draining()
    service = service_of(request)
    is_ready = is_alive(request.app) and not service.engine.is_paused and service.sessions.loss is None
    return Response(status_code=200 if is_ready else 503)


def _draining() -> Response:
    return JSONResponse({"status": "draining"}, 503, {"Retry-After": "1"})
