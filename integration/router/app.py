"""The router's application: its paths and their handlers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.admin import unsupported
from ..http.edge.auth import Level, check_key, check_origin, key_header, level_of
from ..http.edge.bodies import parse_object_off_loop, parsed, read_object, start_parsers
from ..http.edge.errors import BadField, EndingMiddleware, HttpError, error_response, install
from ..http.edge.session_paths import SessionPaths
from .attending import add_attending
from .calls import ROUTER_HEADER, WorkerCall
from .changes.broadcast import broadcast
from .changes.journal import UpdateJournal
from .changes.rules import ELSEWHERE, RULES, SAME, verb_of
from .config import RouterConfig
from .fleet.roster import Roster
from .fleet.served import ServedFile
from .fleet.workers import UnknownWorker, why_none
from .generation import ProxyResponse
from .metrics import render
from .router import Router, call_of, call_of_report, router_of
from .worker_paths import add_workers

_OPEN_PATHS = frozenset({"/liveness", "/readiness"})
_NORMAL_PATHS = frozenset({"/get_loads"})


def create_app(config: RouterConfig, journal: UpdateJournal, roster: Roster, served: ServedFile) -> FastAPI:
    """Make the application with the router's paths. From startup to shutdown, the router is `app.state.router`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        start_parsers()
        app.state.router = router = Router(config, journal, roster, served)
        router.start()
        try:
            yield
        finally:
            await router.close()

    app = FastAPI(title="Lockstep router", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.config = config.http
    _add_health(app)
    add_workers(app)
    _add_journal(app)
    _add_admin(app)
    add_attending(app)
    _add_generation(app)
    app.include_router(unsupported.router)  # behind /v1/{path}, since a worker of another kind may serve these
    install(app)
    app.add_exception_handler(UnknownWorker, _answer_unknown)
    app.add_middleware(_Auth, config=config)
    app.add_middleware(EndingMiddleware)
    app.add_middleware(SessionPaths)
    return app


class _Auth:
    """The check of the router's keys. Paths have the same levels as at a worker."""

    def __init__(self, app: ASGIApp, config: RouterConfig) -> None:
        self._app = app
        self._config = config.http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"]
            level = Level.OPEN if path in _OPEN_PATHS else Level.NORMAL if path in _NORMAL_PATHS else level_of(path)
            headers = Headers(scope=scope)
            router: Router = scope["app"].state.router
            try:
                _check_loop(router, headers)
                check_origin(self._config, scope["method"], headers, level)
                check_key(self._config, level, key_header(headers))
            except HttpError as refused:
                await error_response(path, refused)(scope, receive, send)
                return
            with router.open_request() if _is_awaited(scope) else nullcontext():
                await self._app(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _check_loop(router: Router, headers: Headers) -> None:
    """Raise HttpError 508 for a call that this router has sent itself: it would go round for ever."""
    if any(router.name in value for value in headers.getlist(ROUTER_HEADER.decode())):
        raise HttpError(508, "a worker of this router leads back to it", code="loop")


def _is_awaited(scope: Scope) -> bool:
    """Return whether the router waits for the end of this request before it ends: not for reports."""
    return scope["method"] not in ("GET", "HEAD")


async def _answer_unknown(request: Request, error: Exception) -> Response:
    return error_response(request.scope["path"], HttpError(404, str(error.args[0]), code="unknown_worker"))


# -- health and counts -----------------------------------------------------------------------------------------------


def _add_health(app: FastAPI) -> None:
    @app.get("/liveness")
    async def liveness() -> Response:
        """Answer 200 while the router runs."""
        return Response()

    @app.head("/health")
    @app.get("/health")
    @app.get("/health_generate")
    @app.head("/ping")
    @app.get("/ping")
    async def health(request: Request) -> Response:
        """Answer 200 while a worker is alive."""
        return _ok_if(bool(router_of(request).registry.live()), router_of(request))

    @app.get("/readiness")
    @app.head("/ready")
    @app.get("/ready")
    async def readiness(request: Request) -> Response:
        """Answer 200 while a worker takes requests. A router that drains says so in a 503."""
        router = router_of(request)
        if router.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return _ok_if(any(worker.can_take_requests and not worker.paused for worker in router.registry), router)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return the router's metrics in Prometheus' format."""
        text, content_type = render(router_of(request).collector, request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    @app.get("/get_loads")
    async def get_loads(request: Request) -> JSONResponse:
        """List each worker with its number of running sequences."""
        loads = [{"worker": worker.url, "load": worker.num_running} for worker in router_of(request).registry]
        return JSONResponse({"workers": loads})

    @app.get("/v1/loads")
    async def all_loads(request: Request) -> JSONResponse:
        """List the loads of all live workers, each with its worker."""
        router = router_of(request)
        live, config = router.registry.live(), router.config
        async with call_of_report(request) as call:
            results = await broadcast(
                router.administering, live, call, config.health_timeout_s, config.max_admin_answer_bytes
            )  # fmt: skip
        merged, failed = [], {}
        for result in results:
            loads = result.body.get("loads") if result.success and isinstance(result.body, dict) else None
            if isinstance(loads, list) and all(isinstance(load, dict) for load in loads):
                merged += [{**load, "worker": result.worker.url} for load in loads]
            else:
                failed[result.worker.url] = result.message or f"answered {result.status}"
        if failed or not live:
            raise HttpError(
                502 if live else 503, f"no loads of: {failed or why_none(router.registry)}", code="workers_failed",
                extra={"loads": merged},
            )  # fmt: skip
        return JSONResponse({"timestamp": time.time(), "loads": merged})


def _ok_if(is_well: bool, router: Router) -> Response:
    return Response() if is_well else Response(why_none(router.registry), 503, media_type="text/plain")


# -- administration --------------------------------------------------------------------------------------------------


def _add_journal(app: FastAPI) -> None:
    @app.get("/weight_update_journal")
    async def show(request: Request) -> JSONResponse:
        """Show the journal of the update in progress or unresolved."""
        return JSONResponse(router_of(request).admin.updates.journal.report())

    @app.post("/weight_update_journal/resolve")
    async def resolve(request: Request) -> JSONResponse:
        """Mark the unresolved update as resolved: {acknowledge: true, enable: true}. With enable false, its targets are
        disabled until an operator enables them. With force true, an update in progress is forgotten too."""
        body = await read_object(request, request.app.state.config.max_control_body_bytes)
        if body.get("acknowledge") is not True:
            raise BadField("acknowledge", 'send {"acknowledge": true} when the weights of all workers are right')
        enable, force = body.get("enable", True) is not False, body.get("force") is True
        return JSONResponse(await router_of(request).admin.resolve(enable, force))


def _add_admin(app: FastAPI) -> None:
    async def administer(request: Request) -> Response:
        router, path = router_of(request), request.scope["path"]
        config, verb = router.config, verb_of(path)

        async def run(call: WorkerCall, values: Mapping[str, object]) -> Response:
            status, body = await router.admin.run(verb, call, values, request.is_disconnected)
            return Response(body, status, media_type="application/json")

        if not RULES[verb].is_change and level_of(path) is Level.NORMAL:  # a report, whose callers have no admin key
            async with call_of_report(request) as call:
                return await run(call, await parsed(call.body, config.http.max_body_lists, _of_report))
        call = await call_of(request, config.max_admin_body_bytes if RULES[verb].is_change else config.max_body_bytes)
        return await run(call, await parse_object_off_loop(call.body, config.http.max_body_lists))

    for verb, rule in RULES.items():
        # A worker refuses a method that it does not take.
        methods = ["POST", "PUT"] if rule.is_change or rule.acts else ["GET", "POST", "PUT"]
        for path in (f"/{verb}", f"/lockstep/{verb}", f"/hicache/{verb}"):
            app.add_api_route(path, administer, methods=methods, include_in_schema=path == f"/{verb}")
    for path in (*ELSEWHERE, *(f"/{name}" for name in SAME)):
        app.add_api_route(path, administer, methods=["POST"])


def _of_report(values: Mapping[str, object]) -> dict[str, object]:
    """Select the one field of a report's body that a router reads: the others would take memory until it is made."""
    timeout_s = values.get("timeout_s")
    return {"timeout_s": timeout_s} if isinstance(timeout_s, int | float) else {}


# -- generation ------------------------------------------------------------------------------------------------------


def _add_generation(app: FastAPI) -> None:
    async def generate(request: Request) -> Response:
        return ProxyResponse(router_of(request))

    app.add_api_route("/generate", generate, methods=["POST", "PUT"])
    for path in (
        "/renew",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
        "/open_session",
        "/close_session",
        "/parse_function_call",
        "/separate_reasoning",
    ):
        app.add_api_route(path, generate, methods=["POST"])
    app.add_api_route("/session_info", generate, methods=["GET"])
    app.add_api_route("/v1/{path:path}", generate, methods=["GET", "POST"])
