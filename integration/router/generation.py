"""The answer to a generation request: its body is read, its worker chosen, and the worker's answer passed on."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..http.edge.bodies import is_quick, late_body, refuse_compressed
from ..http.edge.disconnect import first_of, until_disconnect
from ..http.edge.errors import HttpError, error_response
from .budget import Share
from .course import Generation
from .fleet.aborted import Aborted
from .fleet.held import draining
from .fleet.peek import peek
from .moving.fields import seeded
from .moving.progress import Progress
from .router import Router, call_with
from .sessions import CLOSE, OPEN, opening, session_of

ROUTING_KEY_HEADER = "x-smg-routing-key"  # slime's header: requests with equal values go to the same worker


class ProxyResponse(Response):
    """A response that runs a generation. If the client disconnects, it leaves the queue for a worker, or closes the
    worker's connection, which aborts the request there."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._router.is_draining and scope["method"] != "GET":
                raise draining()
            # The body counts until the end, because the request may move to another worker until then.
            with self._router.bodies.share() as kept:
                request = Request(scope, receive)
                answering = asyncio.create_task(self._answer(request, await self._read(request, kept), send))
                if await first_of(answering, until_disconnect(receive)):
                    answering.result()
        except ClientDisconnect:
            pass  # with half a body
        except HttpError as error:
            await error_response(scope["path"], error)(scope, receive, send)

    async def _answer(self, request: Request, data: bytes, send: Send) -> None:
        generation = await self._generation(request, data)
        del data  # the generation has its own copy, with further fields
        router = self._router
        try:
            await router.proxy.run(generation, send)
        except Aborted as aborted:
            answer, kind = await aborted.answer(router.registry.served_version, router.config.http.max_body_lists)
            await Response(answer, media_type=kind)(request.scope, request.receive, send)

    async def _read(self, request: Request, kept: Share) -> bytes:
        """Read the body of the request, which counts in `kept`. Raises HttpError 415 for a compressed body, 413 for one
        that is too long, 408 for one that does not arrive in time, 503 where all open bodies are too long, and
        ClientDisconnect."""
        refuse_compressed(request)
        limit = self._router.config.max_body_bytes
        if request.scope["path"] in (OPEN, CLOSE):
            limit = min(limit, self._router.config.http.max_control_body_bytes)
        too_long = HttpError(413, f"the body is longer than {limit} bytes", code="too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_long
        body, timeout_s = bytearray(), self._router.config.http.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_long
                    self._router.keep(kept, len(body))
        except TimeoutError:
            raise late_body(timeout_s) from None
        return bytes(body)

    async def _generation(self, request: Request, data: bytes) -> Generation:
        """Determine how the request is forwarded. Raises HttpError."""
        routing_key = request.headers.get(ROUTING_KEY_HEADER)
        call, max_lists = call_with(request, data), self._router.config.http.max_body_lists
        if call.path == OPEN:
            return Generation(call, (), 1, opens=await opening(call, max_lists))
        if (session_id := await session_of(call, max_lists)) is not None:
            return Generation(seeded(call, wants_progress=False), (), 1, session_id)
        if is_quick(data):
            keys, num_sequences = peek(data, routing_key)
        else:
            keys, num_sequences = await self._router.peek(data, routing_key)
        check = self._router.config.moved_streams
        call = seeded(call, wants_progress=check != "off")
        return Generation(call, keys, num_sequences, progress=Progress(check) if check != "off" else None)
