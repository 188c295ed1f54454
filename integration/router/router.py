"""One router with all its parts, and the functions by which a path gets it."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
from fastapi import Request

from ..http.edge.bodies import read_bytes
from ..http.edge.disconnect import first_of
from ..http.edge.errors import HttpError, no_path
from ..http.edge.session_paths import session_in
from ..http.edge.threads import start_pool
from .budget import Budget, Share
from .calls import ROUTER_HEADER, WorkerCall, headers_of
from .changes.admin import Admin
from .changes.journal import UpdateJournal
from .changes.updates import Updates
from .config import RouterConfig, worker_url
from .counters import RouterCounters
from .fleet.health import HealthChecks
from .fleet.peek import peek
from .fleet.roster import Roster
from .fleet.served import ServedFile
from .fleet.worker import Worker
from .fleet.workers import WorkerRegistry
from .metrics import RouterCollector
from .proxy import Proxy
from .wire import Wire

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[A-Za-z0-9/._~-]+")  # paths that need no percent-encoding


class Router:
    """A router with all its parts, on one event loop."""

    def __init__(self, config: RouterConfig, journal: UpdateJournal, roster: Roster, served: ServedFile) -> None:
        self.config = config
        self.name = uuid.uuid4().hex  # by which it knows its own calls
        self.registry = WorkerRegistry()
        self.registry.served, self.registry.served_file = served.first, served.path
        self.registry.on_served = served.keep
        self._served = served
        self.counters = RouterCounters()
        verify = httpx.create_ssl_context()
        self._generating = Wire(verify, config.connect_timeout_s, num_kept=256)
        # A new connection for each call: a kept connection may be closed, and a change must not be sent twice.
        self.administering = Wire(verify, config.connect_timeout_s, num_kept=0)
        self.proxy = Proxy(self.registry, self._generating, config, self.counters)
        self.bodies = Budget(config.max_open_body_bytes)  # of open generation requests and reports
        self._peeking = start_pool(1, "peek")  # one: more would only take the interpreter from the event loop
        self._health = HealthChecks(self.registry, self.administering, config, self.proxy.forget, self.name)
        updates = Updates(self.registry, self._health, journal, served, config)
        self.admin = Admin(
            self.registry, self._health, updates, roster, self.administering, config, self.counters
        )  # fmt: skip
        self.admin.on_abort = lambda abort: self.proxy.held.abort(abort, config.http.max_body_lists)
        self._health.after_probe = self.admin.end_lost_update
        self.collector = RouterCollector(self.registry, self.counters, journal, self.proxy.held)
        self._num_open = 0  # requests that a drain waits for
        self._all_done = asyncio.Event()
        self.is_over = asyncio.Event()  # requests that are open still are ended

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

    async def peek(self, body: bytes, routing_key: str | None) -> tuple[tuple[bytes, ...], int]:
        """Call `peek` in the thread for it."""
        return await asyncio.get_running_loop().run_in_executor(self._peeking, peek, body, routing_key)

    def keep(self, kept: Share, num_bytes: int) -> None:
        """Count the bytes of a request's body. Raises HttpError 503 where all open bodies are too long."""
        if not kept.resize(num_bytes):
            message = f"the open requests have {self.bodies.limit} bytes already"
            raise HttpError(503, message, code="overloaded", headers={"Retry-After": "1"})

    @property
    def is_draining(self) -> bool:
        """Whether it finishes its open requests and takes no new ones."""
        return self.admin.is_draining

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request as open inside the block."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._all_done.set()

    async def drain(self, limit_s: float, at_once: asyncio.Event) -> None:
        """Take no new requests, and wait until the open ones are done. After `limit_s` seconds, or when `at_once` is
        set, end them with an error."""
        self.admin.is_draining = True
        self.proxy.held.close()
        if not self._num_open:
            return
        logger.info("draining: %d open requests may end within %g s", self._num_open, limit_s)
        self._all_done.clear()
        try:
            async with asyncio.timeout(limit_s):
                done = asyncio.ensure_future(self._all_done.wait())
                await first_of(done, at_once.wait())
        except TimeoutError:
            pass
        if self._num_open:
            logger.warning("%d requests end unfinished", self._num_open)
            self.proxy.end()
            self.is_over.set()

    async def close(self) -> None:
        """Stop the health checks, write what is remembered, and close the connections."""
        await self._health.close()
        await self._served.written()
        await self._generating.close()
        await self.administering.close()
        self._peeking.shutdown(wait=False, cancel_futures=True)


def router_of(request: Request) -> Router:
    """Return the router of a request's application."""
    return request.app.state.router


async def call_of(request: Request, limit: int) -> WorkerCall:
    """Build the call to a worker from a request, with a body of at most `limit` bytes."""
    return call_with(request, await read_bytes(request, limit))


@asynccontextmanager
async def call_of_report(request: Request) -> AsyncIterator[WorkerCall]:
    """Build the call of a report, whose body counts among the open ones until the block ends. Raises HttpError."""
    router = router_of(request)
    with router.bodies.share() as kept:
        call = await call_of(request, router.config.http.max_control_body_bytes)
        router.keep(kept, len(call.body))
        yield call


def call_with(request: Request, body: bytes) -> WorkerCall:
    """Build the call to a worker from a request whose body has been read. A path of plain characters is spelled without
    percent-encoding. Raises BadField for a path of a session with an id that none has."""
    # The key was checked for this path. A path with dots would be another path at the worker.
    if {".", ".."} & set(request.scope["path"].split("/")):
        raise no_path(request.scope["path"])
    # Parts of the router compare it with the paths that they know, so these have one spelling from here on. The others
    # stay as they were sent.
    path = request.scope["path"]
    if not _PLAIN.fullmatch(path):
        path = request.scope["raw_path"].decode("latin-1")
    query = request.scope["query_string"].decode("latin-1")
    headers = (*headers_of(request.headers.raw), (ROUTER_HEADER, router_of(request).name.encode()))
    return WorkerCall(request.method, path, query, headers, body, session_in(request.scope))
