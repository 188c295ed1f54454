"""A client of weight updates that keeps a connection open, and the connections to the workers that follow from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ..http.edge.bodies import parse_object_off_loop
from ..http.edge.disconnect import first_of, keep_open, until_disconnect
from ..http.edge.errors import BadField, HttpError
from .calls import WorkerCall
from .fleet.worker import Worker
from .router import Router, call_of, router_of
from .wire import Wire, WorkerFailed, beginning

_MAX_REFUSAL_BYTES = 1 << 14


def add_attending(app: FastAPI) -> None:
    """Add the path of the clients' connections."""

    @app.post("/lockstep/attend")
    async def attend(request: Request) -> Response:
        """Answer until the connection closes. Then the update that `client` has begun and not ended is taken back at
        all workers, and its pauses end."""
        router = router_of(request)
        call = await call_of(request, router.config.http.max_control_body_bytes)
        values = await parse_object_off_loop(call.body, router.config.http.max_body_lists)
        client = values.get("client")
        if not isinstance(client, str) or not client:
            raise BadField("client", "a name of the caller is needed")
        workers = await router.admin.workers_of_updates()
        return OpenAnswer(router, call, client, workers)


class OpenAnswer(Response):
    """An answer that lasts as long as its client's connection, and those to the workers."""

    def __init__(self, router: Router, call: WorkerCall, client: str, workers: Sequence[Worker]) -> None:
        super().__init__()
        self._router, self._call, self._client = router, call, client
        self._held = [_Held(router.administering, worker, call) for worker in workers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            limit_s = self._router.config.connect_timeout_s + self._router.config.health_timeout_s
            beginning = asyncio.gather(*(held.begin(limit_s) for held in self._held))
            if not await first_of(beginning, self._until_gone(receive)):
                raise HttpError(503, "attend: its client has left, or the router ends", code="not_attended")
            beginning.result()
            if refused := [f"{held.worker.url}: {held.refusal}" for held in self._held if held.refusal]:
                raise HttpError(502, f"attend: {'; '.join(refused)}", code="workers_failed")
            headers = [(b"content-type", b"text/plain"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"attended\n", "more_body": True})
            await keep_open(send, self._until_gone(receive))
            # First for all workers together: one of them may have committed what others have not.
            await self._router.admin.client_left(self._client, self._call)
        finally:
            for held in self._held:
                held.end()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_gone(self, receive: Receive) -> None:
        await first_of(asyncio.ensure_future(until_disconnect(receive)), self._router.is_over.wait())


class _Held:
    """The connection to one worker."""

    def __init__(self, wire: Wire, worker: Worker, call: WorkerCall) -> None:
        self.worker, self.refusal = worker, ""  # refusal: the worker's words, where it has no such connections
        self._wire, self._call = wire, call
        self._has_begun = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self, limit_s: float) -> None:
        """Return when the connection is open, or known not to be. A worker that is not reached, that is found dead or
        that answers nothing for so long is left out: the calls of the update find out what is with it."""
        self._task = asyncio.create_task(self._hold())
        waiting = [asyncio.create_task(event.wait()) for event in (self._has_begun, self.worker.died)]
        try:
            done, _ = await asyncio.wait(
                {self._task, *waiting}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )  # fmt: skip
        finally:
            for one in waiting:
                one.cancel()
        for task in done:
            task.result()  # HttpError for a call that cannot be forwarded
        if not done:
            self.worker.suspect(f"{self._call.path}: no answer within {limit_s:g} s")

    def end(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()

    async def _hold(self) -> None:
        try:
            async with self._wire.call(self.worker.url, self._call) as answer:
                if answer.status_code != 200:
                    body = await beginning(answer, _MAX_REFUSAL_BYTES)
                    self.refusal = f"it answered {answer.status_code}: {_words_of(body)}"
                    return
                self._has_begun.set()
                async for _ in answer.aiter_raw():
                    pass
        except WorkerFailed as error:
            self.worker.suspect(str(error))


def _words_of(body: bytes) -> str:
    """Return the message of a refusal, or its beginning where it has none."""
    try:
        values = json.loads(body)
    except ValueError:
        values = None
    message = values.get("message") if isinstance(values, dict) else None
    return message if isinstance(message, str) else body[:200].decode(errors="replace")
