"""The forwarding of a request to one worker, or to another one if the first fails before it has produced output.

An answer that is no event stream is forwarded when it is complete, so until then the request can move. A stream is
forwarded event by event. After its first event, the failure of its worker ends it with an error event, and without
[DONE].
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..http.edge.disconnect import first_of, until_disconnect
from ..http.edge.errors import HttpError, error_body
from ..one_line import in_one_line
from .calls import WorkerCall
from .config import RouterConfig
from .counters import Affinity, Outcome, RouterCounters
from .fleet.balance import PrefixTable, WorkerLoad, choose
from .fleet.workers import Hold, Worker, WorkerRegistry, why_none
from .relay import Relay, Unavailable

logger = logging.getLogger(__name__)

_END_OF_EVENT = b"\n\n"


@dataclass(frozen=True)
class Generation:
    """A call with the values that determine the choice of its worker."""

    call: WorkerCall
    keys: tuple[bytes, ...]  # keys of its prompt, see `balance.prompt_keys`
    num_sequences: int


class _WorkerDied(Exception):
    """The health checks found the worker dead."""


class _Begun(Exception):
    """The attempt failed after the client had received a part of the answer."""


class Proxy:
    """The part of a router that chooses workers and forwards requests."""

    def __init__(
        self, registry: WorkerRegistry, client: httpx.AsyncClient, config: RouterConfig, counters: RouterCounters
    ) -> None:
        self._registry = registry
        self._counters = counters
        self._client = client
        self._config = config
        self._prefixes = PrefixTable(config.max_prefixes)

    def forget(self, worker: Worker) -> None:
        """Forget the prompts of a worker whose cache is lost."""
        self._prefixes.forget(worker.id)

    async def run(self, generation: Generation, send: Send) -> None:
        """Answer the request. Raises HttpError, before anything was sent, if no worker could answer."""
        try:
            await self._run(generation, send)
        except HttpError as error:
            self._counters.unanswered[error.code or str(error.status)] += 1
            raise

    async def _run(self, generation: Generation, send: Send) -> None:
        deadline = time.monotonic() + self._config.request_timeout_s
        failures: dict[str, str] = {}
        for _ in range(self._config.max_attempts):
            worker = await self._pick(generation, set(failures), deadline)
            self._counters.num_retries += bool(failures)
            relay = Relay(send, worker, is_last=len(failures) + 1 == self._config.max_attempts)
            try:
                with worker.running(generation.num_sequences):
                    why = await self._try(worker, generation.call, relay, deadline)
            finally:
                self._counters.requests[worker.url, relay.outcome] += 1
            if relay.outcome is Outcome.TIMED_OUT and not relay.has_begun:
                raise HttpError(504, why, code="timeout")
            if relay.outcome is not Outcome.MOVED:
                return
            failures[worker.url] = why
        listed = "; ".join(f"{url}: {why}" for url, why in failures.items())
        raise HttpError(502, f"workers failed before they produced anything: {listed}", code="workers_failed")

    async def _try(self, worker: Worker, call: WorkerCall, relay: Relay, deadline: float) -> str:
        """Send the call to a worker. Returns the error or ""; the relay has the outcome. The client is not told of an
        error before the answer has begun."""
        why = ""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._attempt(worker, call, relay)
        except _Begun as error:
            worker.suspect(str(error))
            why = f"worker {worker.url} ended in the middle of this answer: {error}"
            await relay.fail(why, Outcome.BROKEN)
        except TimeoutError:
            why = f"not answered within {self._config.request_timeout_s:g} s by worker {worker.url}"
            await relay.fail(why, Outcome.TIMED_OUT)
        except (_WorkerDied, Unavailable, httpx.TransportError) as error:
            relay.outcome, why = Outcome.MOVED, in_one_line(error)
            worker.suspect(why)
            logger.warning("a request that had produced nothing leaves worker %s: %s", worker.url, why)
        return why

    async def _pick(self, generation: Generation, tried: set[str], deadline: float) -> Worker:
        """Choose the worker for a request. Waits while a broadcast holds all workers back. Raises HttpError 503."""
        deadline = min(deadline, time.monotonic() + self._config.queue_timeout_s)
        while True:
            able = [worker for worker in self._registry if worker.can_take_requests]
            able = [worker for worker in able if worker.url not in tried] or able
            # Requests wait in a paused engine, so one is chosen only if all engines are paused.
            able = [worker for worker in able if not worker.paused] or able
            if able:
                knowing = self._prefixes.knowing(generation.keys)
                loads = [WorkerLoad(worker.id, worker.num_running, worker.num_routed) for worker in able]
                worker = self._registry.find(choose(loads, knowing, self._config.affinity_slack))
                is_known = any(one.id in knowing for one in able)
                hit = Affinity.HIT if worker.id in knowing else Affinity.TOO_BUSY if is_known else Affinity.UNKNOWN
                self._counters.affinity[hit] += 1
                self._prefixes.record(generation.keys, worker.id)
                return worker
            is_short = any(Hold.BROADCAST in worker.holds for worker in self._registry.live())
            if not is_short or not await self._registry.wait_for_change(deadline):
                raise HttpError(
                    503, f"no worker takes requests: {why_none(self._registry)}", code="no_workers",
                    headers={"Retry-After": "1"},
                )  # fmt: skip

    async def _attempt(self, worker: Worker, call: WorkerCall, relay: Relay) -> None:
        """Forward the call until the answer ends or the worker dies. Raises _Begun for an error after the client has
        received a part of the answer; otherwise raises the error itself, and nothing was sent."""
        passing = asyncio.create_task(self._pass_through(worker, call, relay))
        try:
            if not await first_of(passing, worker.died.wait()):
                raise _WorkerDied(worker.last_error or "it is dead")
            passing.result()
        except (_WorkerDied, httpx.TransportError) as error:
            if relay.has_begun:
                raise _Begun(in_one_line(error)) from error
            raise

    async def _pass_through(self, worker: Worker, call: WorkerCall, relay: Relay) -> None:
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


class ProxyResponse(Response):
    """A response that runs a generation. If the client disconnects, it closes the worker's connection, which aborts the
    request there."""

    def __init__(self, proxy: Proxy, generation: Generation) -> None:
        super().__init__()
        self._proxy = proxy
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._answer(scope, receive, send))
        if await first_of(answering, until_disconnect(receive)):
            answering.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._proxy.run(self._generation, send)
        except HttpError as error:
            body = error_body(error, openai=scope["path"].startswith("/v1/"))
            await JSONResponse(body, error.status, error.headers)(scope, receive, send)
