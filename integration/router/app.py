"""The router's application: its paths, and what each of them is passed to."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.auth import Level, check_key, level_of
from ..http.bodies import parse_object, read_bytes
from ..http.errors import BadField, HttpError, error_response, install
from .admin import RULES, Admin
from .balance import num_sequences, prompt_keys
from .broadcast import broadcast
from .config import RouterConfig
from .health import HealthChecks
from .journal import UpdateJournal
from .proxy import Call, Generation, Proxy, ProxyResponse, headers_of, why_none
from .workers import Health, UnknownWorker, Worker, WorkerRegistry

_OPEN_PATHS = frozenset({"/liveness", "/readiness"})
_NORMAL_PATHS = frozenset({"/get_loads"})
ROUTING_KEY_HEADER = "x-smg-routing-key"  # slime's: what has the same one goes to the same worker


class Router:
    """Everything of one router, on one event loop."""

    def __init__(self, config: RouterConfig, journal: UpdateJournal) -> None:
        self.config = config
        self.registry = WorkerRegistry()
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        verify = httpx.create_ssl_context()
        self._generating = httpx.AsyncClient(limits=unlimited, timeout=None, trust_env=False, verify=verify)
        # A connection of its own for each call: one that was kept may be dead, and a change is not sent twice.
        single = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=config.connect_timeout_s)
        self.administering = httpx.AsyncClient(limits=single, timeout=timeout, trust_env=False, verify=verify)
        self.proxy = Proxy(self.registry, self._generating, config)
        self._health = HealthChecks(self.registry, self.administering, config, self.proxy.forget)
        self.admin = Admin(self.registry, self._health, journal, self.administering, config)

    def start(self) -> None:
        """Take the configured workers, and those that were disabled when an update was broken off, as they were."""
        entry = self.admin.journal.entry
        disabled = {target.url for target in entry.targets if target.disabled} if entry is not None else set()
        for url in self.config.workers:
            self.add(url, url in disabled)

    def add(self, url: str, disabled: bool = False) -> tuple[Worker, bool]:
        """See `WorkerRegistry.add`; a new one is probed from now on."""
        worker, is_new = self.registry.add(url, disabled)
        if is_new:
            self.admin.apply_journal(worker)
            self._health.watch(worker)
        return worker, is_new

    def remove(self, worker: Worker) -> None:
        self._health.forget(worker)
        self.registry.remove(worker)
        self.proxy.forget(worker)

    async def close(self) -> None:
        await self._health.close()
        await self._generating.aclose()
        await self.administering.aclose()


def create_app(config: RouterConfig, journal: UpdateJournal) -> FastAPI:
    """The router's paths. The application owns the router from its startup to its shutdown, as `app.state.router`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.router = router = Router(config, journal)
        router.start()
        try:
            yield
        finally:
            await router.close()

    app = FastAPI(title="Lockstep router", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.config = config.http
    _add_health(app)
    _add_workers(app)
    _add_journal(app)
    _add_admin(app)
    _add_generation(app)
    install(app)
    app.add_exception_handler(UnknownWorker, _answer_unknown)
    app.add_middleware(_Auth, config=config)
    return app


class _Auth:
    """The keys of the router, with the levels that the same paths have at a worker."""

    def __init__(self, app: ASGIApp, config: RouterConfig) -> None:
        self._app = app
        self._config = config.http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"]
            level = Level.OPEN if path in _OPEN_PATHS else Level.NORMAL if path in _NORMAL_PATHS else level_of(path)
            try:
                check_key(self._config, level, Headers(scope=scope).get("authorization"))
            except HttpError as refused:
                await error_response(path, refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    return error_response(request.scope["path"], HttpError(404, str(error.args[0]), code="unknown_worker"))


def _router(request: Request) -> Router:
    return request.app.state.router


async def _call(request: Request, limit: int) -> Call:
    # What was allowed is the path as it stands: one with dots in it would be another one at the worker.
    if {".", ".."} & set(request.scope["path"].split("/")):
        raise HttpError(404, "Not Found")
    path = request.scope["raw_path"].decode("latin-1")
    headers = headers_of(request.headers.items())
    return Call(request.method, path, request.url.query, headers, await read_bytes(request, limit))


# -- health ----------------------------------------------------------------------------------------------------------


def _add_health(app: FastAPI) -> None:
    @app.get("/liveness")
    async def liveness() -> Response:
        return Response()

    @app.get("/health")
    @app.get("/health_generate")
    async def health(request: Request) -> Response:
        """200 while a worker lives."""
        return _ok_if(bool(_router(request).registry.live()), _router(request))

    @app.get("/readiness")
    @app.get("/ready")
    async def readiness(request: Request) -> Response:
        """200 while a worker takes requests."""
        router = _router(request)
        return _ok_if(any(worker.can_take_requests and not worker.paused for worker in router.registry), router)

    @app.get("/get_loads")
    async def get_loads(request: Request) -> JSONResponse:
        loads = [{"worker": worker.url, "load": worker.num_running} for worker in _router(request).registry]
        return JSONResponse({"workers": loads})

    @app.get("/v1/loads")
    async def loads(request: Request) -> JSONResponse:
        """The loads of all live workers in one list, each with its worker."""
        router = _router(request)
        call = await _call(request, router.config.http.max_body_bytes)
        live = router.registry.live()
        results = await broadcast(router.administering, live, call, router.config.health_timeout_s)
        merged, failed = [], {}
        for result in results:
            if result.success and isinstance(result.body, dict) and isinstance(result.body.get("loads"), list):
                merged += [{**load, "worker": result.worker.url} for load in result.body["loads"]]
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


# -- workers ---------------------------------------------------------------------------------------------------------


def _add_workers(app: FastAPI) -> None:
    @app.get("/workers")
    async def list_workers(request: Request) -> JSONResponse:
        workers = list(_router(request).registry)
        num_healthy = sum(worker.health is Health.ALIVE for worker in workers)
        stats = {"num_healthy": num_healthy, "num_routable": sum(worker.can_take_requests for worker in workers)}
        return JSONResponse(
            {"workers": [worker.report() for worker in workers], "total": len(workers), "stats": stats}
        )

    @app.post("/workers")
    async def add(request: Request) -> JSONResponse:
        """{url}; other fields of the gateway's (worker_type, …) are ignored."""
        body = parse_object(await read_bytes(request, request.app.state.config.max_body_bytes))
        return await _add(request, body.get("url"), bool(body.get("disabled", False)))

    @app.post("/add_worker")
    async def add_old(request: Request, url: str = "") -> JSONResponse:
        return await _add(request, url)

    @app.get("/list_workers")
    async def list_old(request: Request) -> JSONResponse:
        return JSONResponse({"urls": [worker.url for worker in _router(request).registry]})

    @app.post("/remove_worker")
    async def remove_old(request: Request, url: str = "") -> JSONResponse:
        return await _remove(request, url)

    @app.get("/workers/{worker_id}")
    async def show(request: Request, worker_id: str) -> JSONResponse:
        return JSONResponse(_router(request).registry.find(worker_id).report())

    @app.delete("/workers/{worker_id}")
    async def remove(request: Request, worker_id: str) -> JSONResponse:
        return await _remove(request, worker_id)

    @app.put("/workers/{worker_id}")
    async def change(request: Request, worker_id: str) -> JSONResponse:
        """{disabled: bool}"""
        body = parse_object(await read_bytes(request, request.app.state.config.max_body_bytes))
        disabled = body.get("disabled")
        if not isinstance(disabled, bool):
            raise BadField("disabled", f"must be true or false, not {disabled!r}")
        return await _set_disabled(request, worker_id, disabled)

    @app.post("/workers/{worker_id}/disable")
    async def disable(request: Request, worker_id: str) -> JSONResponse:
        return await _set_disabled(request, worker_id, True)

    @app.post("/workers/{worker_id}/enable")
    async def enable(request: Request, worker_id: str) -> JSONResponse:
        return await _set_disabled(request, worker_id, False)


async def _add(request: Request, url: object, disabled: bool = False) -> JSONResponse:
    router = _router(request)
    async with router.admin.changing("adding a worker"):
        try:
            worker, is_new = router.add(url, disabled)  # type: ignore[arg-type]
        except ValueError as error:
            raise BadField("url", str(error)) from None
    told = "is added, and gets requests when its probe succeeds" if is_new else "was there"
    body = {"success": True, "status": "accepted", "worker_id": worker.id, "url": worker.url}
    return JSONResponse(
        {**body, "location": f"/workers/{worker.id}", "message": f"worker {worker.url} {told}"}, 202 if is_new else 200
    )


async def _remove(request: Request, id_or_url: str) -> JSONResponse:
    router = _router(request)
    async with router.admin.changing("removing a worker"):
        worker = router.registry.find(id_or_url)
        router.remove(worker)
    message = f"worker {worker.url} is removed; what it was doing it finishes"
    return JSONResponse({"success": True, "status": "accepted", "worker_id": worker.id, "message": message}, 202)


async def _set_disabled(request: Request, worker_id: str, disabled: bool) -> JSONResponse:
    router = _router(request)
    async with router.admin.changing("disabling a worker" if disabled else "enabling a worker"):
        worker = router.registry.find(worker_id)
        router.registry.set_disabled(worker, disabled)
    return JSONResponse({"success": True, **worker.report()})


# -- administration --------------------------------------------------------------------------------------------------


def _add_journal(app: FastAPI) -> None:
    @app.get("/weight_update_journal")
    async def show(request: Request) -> JSONResponse:
        return JSONResponse(_router(request).admin.journal.report())

    @app.post("/weight_update_journal/resolve")
    async def resolve(request: Request) -> JSONResponse:
        """{acknowledge: true, enable: true}; enable false: the targets stay disabled until somebody enables them."""
        body = parse_object(await read_bytes(request, request.app.state.config.max_body_bytes))
        if body.get("acknowledge") is not True:
            raise BadField("acknowledge", 'send {"acknowledge": true} when the weights of all workers are right')
        return JSONResponse(await _router(request).admin.resolve(body.get("enable", True) is not False))


def _add_admin(app: FastAPI) -> None:
    async def administer(request: Request) -> JSONResponse:
        router = _router(request)
        call = await _call(request, router.config.max_admin_body_bytes)
        values: Mapping[str, object] = parse_object(call.body)
        verb = request.scope["path"].rpartition("/")[2]
        status, body = await router.admin.run(verb, call, values, request.is_disconnected)
        return JSONResponse(body, status)

    for verb, rule in RULES.items():
        # What changes a worker is never a GET; a worker that does not take the method says so itself.
        methods = ["POST", "PUT"] if rule.is_change else ["GET", "POST", "PUT"]
        for path in (f"/{verb}", f"/lockstep/{verb}", f"/hicache/{verb}"):
            app.add_api_route(path, administer, methods=methods, include_in_schema=path == f"/{verb}")


# -- generation ------------------------------------------------------------------------------------------------------


def _add_generation(app: FastAPI) -> None:
    async def generate(request: Request) -> Response:
        router = _router(request)
        call = await _call(request, router.config.http.max_body_bytes)
        try:
            body = parse_object(call.body)
        except HttpError:  # the worker says what is wrong with it
            body = {}
        keys = prompt_keys(body, request.headers.get(ROUTING_KEY_HEADER))
        return ProxyResponse(router.proxy, Generation(call, keys, num_sequences(body)))

    app.add_api_route("/generate", generate, methods=["POST", "PUT"])
    app.add_api_route("/v1/{path:path}", generate, methods=["GET", "POST"])
