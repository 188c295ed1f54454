"""One router with all its parts, and the functions by which a path gets it."""

from __future__ import annotations

import httpx
from fastapi import Request

from ..http.edge.bodies import read_bytes
from ..http.edge.errors import HttpError
from .calls import WorkerCall, headers_of
from .changes.admin import Admin
from .changes.journal import UpdateJournal
from .changes.updates import Updates
from .config import RouterConfig, worker_url
from .counters import RouterCounters
from .fleet.health import HealthChecks
from .fleet.roster import Roster
from .fleet.workers import Worker, WorkerRegistry
from .metrics import RouterCollector
from .proxy import Proxy


class Router:
    """A router with all its parts, on one event loop."""

    def __init__(self, config: RouterConfig, journal: UpdateJournal, roster: Roster) -> None:
        self.config = config
        self.registry = WorkerRegistry()
        self.counters = RouterCounters()
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        verify = httpx.create_ssl_context()
        self._generating = httpx.AsyncClient(limits=unlimited, timeout=None, trust_env=False, verify=verify)
        # A new connection for each call: a kept connection may be closed, and a change must not be sent twice.
        single = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=config.connect_timeout_s)
        self.administering = httpx.AsyncClient(limits=single, timeout=timeout, trust_env=False, verify=verify)
        self.proxy = Proxy(self.registry, self._generating, config, self.counters)
        self._health = HealthChecks(self.registry, self.administering, config, self.proxy.forget)
        updates = Updates(self.registry, self._health, journal, config)
        self.admin = Admin(
            self.registry, self._health, updates, roster, self.administering, config, self.counters
        )  # fmt: skip
        self.collector = RouterCollector(self.registry, self.counters, journal)

    def start(self) -> None:
        """Add the workers of the command line, with the changes that were made at run time."""
        changes = self.admin.roster.changes
        for url in changes.workers:
            self._take(url, url in changes.disabled)

    async def add(self, url: object, disabled: bool = False) -> tuple[Worker, bool]:
        """Add a worker, see `WorkerRegistry.add`. A new one is probed from now on. Raises ValueError for a text that is
        no URL of a server, HttpError 503 where the roster cannot be written."""
        url = worker_url(url)
        if not any(worker.url == url for worker in self.registry):
            await self.admin.write_down(lambda: self.admin.roster.add(url, disabled))
        return self._take(url, disabled)

    async def remove(self, worker: Worker) -> None:
        """Remove a worker. Its running requests finish. Raises HttpError 503 where the roster cannot be written."""
        await self.admin.write_down(lambda: self.admin.roster.remove(worker.url))
        self._health.forget(worker)
        self.registry.remove(worker)
        self.proxy.forget(worker)
        self.counters.forget(worker.url)

    def _take(self, url: str, disabled: bool) -> tuple[Worker, bool]:
        worker, is_new = self.registry.add(url, disabled)
        if is_new:
            self.admin.updates.hold_back(worker)
            self._health.watch(worker)
        return worker, is_new

    async def close(self) -> None:
        """Stop the health checks and close the connections."""
        await self._health.close()
        await self._generating.aclose()
        await self.administering.aclose()


def router_of(request: Request) -> Router:
    """Return the router of a request's application."""
    return request.app.state.router


async def call_of(request: Request, limit: int) -> WorkerCall:
    """Build the call to a worker from a request, with a body of at most `limit` bytes."""
    # The key was checked for this path. A path with dots would be another path at the worker.
    if {".", ".."} & set(request.scope["path"].split("/")):
        raise HttpError(404, "Not Found")
    path = request.scope["raw_path"].decode("latin-1")
    headers = headers_of(request.headers.items())
    return WorkerCall(request.method, path, request.url.query, headers, await read_bytes(request, limit))
