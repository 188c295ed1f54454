"""The paths of workers: list, show, add, remove, disable, enable. The last four are kept on disk, see `roster`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from ..http.edge.bodies import read_object
from ..http.edge.errors import BadField
from .fleet.worker import Health, Worker
from .router import Router, router_of


def add_workers(app: FastAPI) -> None:
    """Add the paths of workers: under /workers as in SGLang's gateway, and under the names of its predecessor."""

    @app.get("/workers")
    async def list_workers(request: Request) -> JSONResponse:
        """List all workers with their states, and the weights that they serve, or served last."""
        return JSONResponse(_report(router_of(request)))

    @app.post("/workers")
    async def add(request: Request) -> JSONResponse:
        """Add a worker: {url, disabled}. A known one is disabled, too, and never enabled. Other fields of SGLang's
        gateway (worker_type, …) are ignored."""
        body = await read_object(request, request.app.state.config.max_control_body_bytes)
        return await _add(request, body.get("url"), _flag(body, "disabled"))

    @app.post("/add_worker")
    async def add_old(request: Request, url: str = "") -> JSONResponse:
        """Add the worker that the query's `url` names."""
        return await _add(request, url)

    @app.get("/list_workers")
    async def list_old(request: Request) -> JSONResponse:
        """List the URLs of all workers."""
        return JSONResponse({"urls": [worker.url for worker in router_of(request).registry]})

    @app.post("/remove_worker")
    async def remove_old(request: Request, url: str = "") -> JSONResponse:
        """Remove the worker that the query's `url` names."""
        return await _remove(request, url)

    @app.get("/workers/{worker_id}")
    async def show(request: Request, worker_id: str) -> JSONResponse:
        """Show one worker."""
        return JSONResponse(router_of(request).registry.find(worker_id).report())

    @app.delete("/workers/{worker_id}")
    async def remove(request: Request, worker_id: str) -> JSONResponse:
        """Remove a worker. Its running requests finish."""
        return await _remove(request, worker_id)

    @app.put("/workers/{worker_id}")
    async def change(request: Request, worker_id: str) -> JSONResponse:
        """Disable or enable a worker: {disabled: bool}."""
        body = await read_object(request, request.app.state.config.max_control_body_bytes)
        disabled = body.get("disabled")
        if not isinstance(disabled, bool):
            raise BadField("disabled", f"must be true or false, not {disabled!r}")
        return await _set_disabled(request, worker_id, disabled)

    @app.post("/workers/{worker_id}/disable")
    async def disable(request: Request, worker_id: str) -> JSONResponse:
        """Send no more requests to a worker."""
        return await _set_disabled(request, worker_id, True)

    @app.post("/workers/{worker_id}/enable")
    async def enable(request: Request, worker_id: str) -> JSONResponse:
        """Send requests to a worker again."""
        return await _set_disabled(request, worker_id, False)


def _report(router: Router) -> dict[str, object]:
    workers, served = list(router.registry), router.registry.served.weights
    return {
        "workers": [worker.report() for worker in workers],
        "total": len(workers),
        "stats": _stats(workers) | {"num_held_requests": len(router.proxy.held)},
        "served": None if served is None else {"weight_version": served.version, "weight_digest": served.digest},
    }


def _stats(workers: Sequence[Worker]) -> dict[str, int]:
    return {
        "num_healthy": sum(worker.health is Health.ALIVE for worker in workers),
        "num_routable": sum(worker.can_take_requests for worker in workers),
    }


def _flag(body: Mapping[str, object], name: str) -> bool:
    """Return a field that is true or false, absent or null. Raises BadField."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise BadField(name, f"must be true or false, not {value!r:.100}")
    return bool(value)


async def _add(request: Request, url: object, disabled: bool = False) -> JSONResponse:
    router = router_of(request)
    async with router.admin.changing("adding a worker"):
        try:
            worker, is_new = await router.add(url, disabled)
        except ValueError as error:
            raise BadField("url", str(error)) from None
        if disabled and not is_new:
            await router.admin.set_disabled([worker], True)
    told = "is added" if is_new else "was there"
    if worker.disabled:
        told += ", and gets no requests, since it is disabled"
    elif is_new:
        told += ", and gets requests when its probe succeeds"
    body = {"success": True, "status": "accepted", "worker_id": worker.id, "url": worker.url}
    return JSONResponse(
        {**body, "location": f"/workers/{worker.id}", "message": f"worker {worker.url} {told}"}, 202 if is_new else 200
    )


async def _remove(request: Request, id_or_url: str) -> JSONResponse:
    router = router_of(request)
    async with router.admin.changing("removing a worker"):
        worker = router.registry.find(id_or_url)
        await router.remove(worker)
    message = f"worker {worker.url} is removed; what it was doing it finishes"
    return JSONResponse({"success": True, "status": "accepted", "worker_id": worker.id, "message": message}, 202)


async def _set_disabled(request: Request, worker_id: str, disabled: bool) -> JSONResponse:
    router = router_of(request)
    async with router.admin.changing("disabling a worker" if disabled else "enabling a worker"):
        worker = router.registry.find(worker_id)
        await router.admin.set_disabled([worker], disabled)
    return JSONResponse({"success": True, **worker.report()})
