"""The application: the paths of the Tinker API that create sessions, train, save and sample.

Errors are a status and {"detail": message}: the SDK shows both. It repeats a request after 408, 409, 429 and 5xx, so
these stand for what another try may change; what is not supported is a 400.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from ...http.edge.auth import Level, check_origin
from ...http.edge.bodies import start_parsers
from ...http.edge.config import HttpConfig
from ...http.edge.errors import EndingMiddleware, HttpError, as_http_error, forget_frames
from ...version import version
from ..training.config import TinkerConfig
from ..training.trainer import Trainer
from . import client_calls, models, rest, samplers
from .served import Served
from .sessions import Sessions
from .worker import Worker

_SWEEP_S = 5.0  # between two looks for clients that have gone silent; less where their time is short
_OPEN_PATHS = frozenset({"/api/v1/healthz"})
_CLOSE_TIMEOUT_S = 60.0  # for the job that runs when the server ends
PREFIX = "/api/v1"


def create_app(trainer: Trainer, config: TinkerConfig, http: HttpConfig) -> FastAPI:
    """Make the application. From its startup to its shutdown the worker's thread trains and samples."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        start_parsers()
        worker = Worker(trainer)
        app.state.served = served = Served(trainer, config, Sessions(config, worker))
        worker.start()
        served.sweep_every(min(_SWEEP_S, config.session_timeout_s / 4, config.gap_s / 4))
        try:
            yield
        finally:
            served.stop_sweeping()
            worker.close(_CLOSE_TIMEOUT_S)

    app = FastAPI(title="Lockstep for Tinker", version=version(), docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.config = http
    for router in (client_calls.router, models.router, samplers.router, rest.router):
        app.include_router(router, prefix=PREFIX)
    for kind in (HTTPException, HttpError, ValueError, OSError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(_Auth, config=http)
    app.add_middleware(EndingMiddleware)
    return app


class _Auth:
    """The check of the key, before a body is read. The SDK sends it as X-API-Key; a bearer token is taken, too."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            headers = Headers(scope=scope)
            level = Level.OPEN if scope["path"] in _OPEN_PATHS else Level.NORMAL
            try:
                check_origin(self._config, scope["method"], headers, level)
                if level is not Level.OPEN:
                    self._check_key(headers)
            except HttpError as refused:
                await error_response(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_key(self, headers: Headers) -> None:
        if not (key := self._config.api_key):
            return
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not given:
            raise HttpError(401, "an API key is missing: set TINKER_API_KEY for the client", code="unauthorized")
        if not hmac.compare_digest(given.encode("latin-1"), key.encode()):
            raise HttpError(403, "the API key is not this server's", code="forbidden")


def error_response(error: Exception) -> JSONResponse:
    """Make the answer to a request that failed."""
    answer = as_http_error(error)
    forget_frames(error)
    return JSONResponse({"detail": answer.message}, answer.status, answer.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        path = request.scope["path"][:200]
        text = (
            f"{request.method[:20]} {path} is not a path of this server"
            if error.status_code in (404, 405)
            else error.detail
        )
        error = HttpError(error.status_code, str(text), headers=error.headers)
    return error_response(error)
