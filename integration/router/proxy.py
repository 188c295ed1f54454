"""One request through to one worker, and on to another where the first dies before it has produced anything.

An answer that is no event stream is passed on when it is complete, so until then the request can move. A stream is
passed on event by event; once its first event is out, the death of its worker ends it with an error event, and without
[DONE].
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..http.errors import HttpError, error_body
from .balance import Load, PrefixTable, choose
from .config import RouterConfig
from .workers import Hold, Worker, WorkerRegistry

logger = logging.getLogger(__name__)

# Those of one connection, those that we write anew, and those that would pack an event stream.
_NOT_FORWARDED = frozenset(
    {"host", "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te",
     "trailer", "transfer-encoding", "upgrade", "content-length", "accept-encoding", "expect"}
)  # fmt: skip
_NOT_RETURNED = _NOT_FORWARDED | {"date", "server"}
_END_OF_EVENT = b"\n\n"
WORKER_HEADER = "x-lockstep-worker"


@dataclass(frozen=True)
class Call:
    """A request as it goes to a worker."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]  # without those of the connection
    body: bytes

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


@dataclass(frozen=True)
class Generation:
    """A call with what the choice of its worker depends on."""

    call: Call
    keys: tuple[bytes, ...]  # of its prompt, see `balance.prompt_keys`
    num_sequences: int


class _WorkerDied(Exception):
    """The health checks gave the worker up."""


class _Begun(Exception):
    """The client has a part of the answer; the rest is lost."""


def headers_of(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """A client's headers that go on to a worker: Authorization does, what belongs to the connection does not."""
    kept = [(name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED]
    return (*kept, ("accept-encoding", "identity"))


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Proxy:
    """Chooses workers and passes requests through."""

    def __init__(self, registry: WorkerRegistry, client: httpx.AsyncClient, config: RouterConfig) -> None:
        self._registry = registry
        self._client = client
        self._config = config
        self._prefixes = PrefixTable(config.max_prefixes)

    def forget(self, worker: Worker) -> None:
        """Its cache is gone."""
        self._prefixes.forget(worker.id)

    async def run(self, generation: Generation, send: Send) -> None:
        """Answer the request. Raises HttpError for one that no worker could answer, before anything was sent."""
        deadline = time.monotonic() + self._config.request_timeout_s
        failures: dict[str, str] = {}
        for _ in range(self._config.max_attempts):
            worker = await self._pick(generation, set(failures), deadline)
            relay = _Relay(send, worker, is_last=len(failures) + 1 == self._config.max_attempts)
            with worker.running(generation.num_sequences):
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._attempt(worker, generation.call, relay)
                    return
                except _Begun as error:
                    worker.suspect(str(error))
                    await relay.fail(f"worker {worker.url} ended in the middle of this answer: {error}")
                    return
                except TimeoutError:
                    why = f"not answered within {self._config.request_timeout_s:g} s"
                    if relay.has_begun:
                        await relay.fail(f"{why} by worker {worker.url}")
                        return
                    raise HttpError(504, f"{why} by worker {worker.url}", code="timeout") from None
                except (_WorkerDied, _Unavailable, httpx.TransportError) as error:
                    failures[worker.url] = why = describe(error)
                    worker.suspect(why)
                    logger.warning("a request that had produced nothing leaves worker %s: %s", worker.url, why)
        listed = "; ".join(f"{url}: {why}" for url, why in failures.items())
        raise HttpError(502, f"workers failed before they produced anything: {listed}", code="workers_failed")

    async def _pick(self, generation: Generation, tried: set[str], deadline: float) -> Worker:
        """The worker for a request, waiting while all of them are held back by a broadcast. Raises HttpError 503."""
        deadline = min(deadline, time.monotonic() + self._config.queue_timeout_s)
        while True:
            able = [worker for worker in self._registry if worker.can_take_requests]
            able = [worker for worker in able if worker.url not in tried] or able
            # An engine that is paused makes requests wait; only where all are is that what should happen.
            able = [worker for worker in able if not worker.paused] or able
            if able:
                knowing = self._prefixes.knowing(generation.keys)
                loads = [Load(worker.id, worker.num_running, worker.num_routed) for worker in able]
                worker = self._registry.find(choose(loads, knowing, self._config.affinity_slack))
                self._prefixes.record(generation.keys, worker.id)
                return worker
            is_short = any(Hold.BROADCAST in worker.holds for worker in self._registry.live())
            if not is_short or not await self._registry.wait_for_change(deadline):
                raise HttpError(
                    503, f"no worker takes requests: {why_none(self._registry)}", code="no_workers",
                    headers={"Retry-After": "1"},
                )  # fmt: skip

    async def _attempt(self, worker: Worker, call: Call, relay: _Relay) -> None:
        """Raises _Begun where the client has a part; otherwise whatever was wrong, and nothing was sent."""
        passing = asyncio.create_task(self._pass_through(worker, call, relay))
        death = asyncio.create_task(worker.died.wait())
        try:
            await asyncio.wait({passing, death}, return_when=asyncio.FIRST_COMPLETED)
            if not passing.done():
                raise _WorkerDied(worker.last_error or "it is dead")
            passing.result()
        except (_WorkerDied, httpx.TransportError) as error:
            if relay.has_begun:
                raise _Begun(describe(error)) from error
            raise
        finally:
            for task in (passing, death):
                task.cancel()
            await asyncio.gather(passing, death, return_exceptions=True)

    async def _pass_through(self, worker: Worker, call: Call, relay: _Relay) -> None:
        timeout = httpx.Timeout(None, connect=self._config.connect_timeout_s)
        async with self._client.stream(
            call.method, worker.url + call.target, headers=list(call.headers), content=call.body, timeout=timeout
        ) as answer:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await relay.whole(answer, b"".join([part async for part in answer.aiter_raw()]))
                return
            rest = b""
            async for part in answer.aiter_raw():
                events, end, rest = (rest + part).rpartition(_END_OF_EVENT)
                if end:
                    await relay.events(answer, events + end)
            await relay.end(answer, rest)


class _Unavailable(Exception):
    """The worker says that it takes nothing now."""


class _Relay:
    """The client's side of one attempt."""

    def __init__(self, send: Send, worker: Worker, is_last: bool) -> None:
        self._send = send
        self._worker = worker
        self._is_last = is_last
        self.has_begun = False

    async def whole(self, answer: httpx.Response, body: bytes) -> None:
        if answer.status_code == 503 and not self._is_last:
            raise _Unavailable(f"it answered 503: {body[:200].decode(errors='replace')}")
        await self._start(answer, [("content-length", str(len(body)))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def events(self, answer: httpx.Response, events: bytes) -> None:
        if not self.has_begun:
            await self._start(answer, [])
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, answer: httpx.Response, rest: bytes) -> None:
        if not self.has_begun:
            await self._start(answer, [])
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def fail(self, message: str) -> None:
        """End a stream that has begun."""
        error = {"message": message, "type": "worker_died", "param": None, "code": 502, "retryable": True}
        event = f"data: {json.dumps({'error': error})}\n\n".encode()
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _start(self, answer: httpx.Response, more: list[tuple[str, str]]) -> None:
        kept = [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in _NOT_RETURNED]
        headers = [*kept, *more, (WORKER_HEADER, self._worker.url)]
        self.has_begun = True
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": answer.status_code, "headers": raw})


def why_none(registry: WorkerRegistry) -> str:
    """Why nobody takes requests, worker by worker."""
    said = []
    for worker in registry:
        if not worker.is_alive:
            said.append(f"{worker.url} is {worker.health.value} ({worker.last_error or 'not answered yet'})")
        elif worker.disabled:
            said.append(f"{worker.url} is disabled")
        else:
            said.append(f"{worker.url} is held: {'; '.join(worker.holds.values())}")
    return "; ".join(said) or "there are none"


class ProxyResponse(Response):
    """Runs a generation while it listens for the client's disconnect: then the worker's connection is closed, which
    aborts the request there."""

    def __init__(self, proxy: Proxy, generation: Generation) -> None:
        super().__init__()
        self._proxy = proxy
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._proxy.run(self._generation, send)
        except HttpError as error:
            body = error_body(error, openai=scope["path"].startswith("/v1/"))
            await JSONResponse(body, error.status, error.headers)(scope, receive, send)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
