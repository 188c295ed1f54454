"""Connections that clients of weight updates keep open, by whose end the engine knows at once that they are gone."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.types import Receive, Scope, Send

from ...service import RolloutService
from ...weights.options import MAX_CLIENT, check_client
from ..edge.bodies import AdminBody, body_of, describe
from ..edge.disconnect import first_of, keep_open, until_disconnect
from ..edge.errors import BadField
from ..edge.threads import Threads

logger = logging.getLogger(__name__)
router = APIRouter(tags=["weights"])


class AttendBody(AdminBody):
    """Fields of attend."""

    client: Annotated[str, Field(min_length=1, max_length=MAX_CLIENT)]


class Attendance:
    """The clients that are attended. Belongs to one event loop."""

    def __init__(self, service: RolloutService, threads: Threads) -> None:
        """Attend to none. threads: the end of a client may wait there for a call of its update."""
        self._service, self._threads = service, threads
        self._is_over = asyncio.Event()

    def close(self) -> None:
        """End all connections: the server ends."""
        self._is_over.set()

    async def until_gone(self, receive: Receive) -> None:
        """Wait until the connection of a client has closed, or the server ends."""
        await first_of(asyncio.ensure_future(until_disconnect(receive)), self._is_over.wait())

    def leave(self, client: str) -> None:
        """Take back what a client has begun and not ended. Does not wait."""
        self._threads.start(lambda: self._service.clients.leave(client))


class _OpenAnswer(Response):
    """An answer that lasts as long as its connection."""

    def __init__(self, attendance: Attendance, client: str) -> None:
        super().__init__()
        self._attendance, self._client = attendance, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"attended\n", "more_body": True})
            await keep_open(send, self._attendance.until_gone(receive))
        finally:
            self._attendance.leave(self._client)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.post("/lockstep/attend", openapi_extra=describe(AttendBody), response_class=Response)
async def attend(request: Request) -> Response:
    """Answer until the connection closes. Then the update that `client` has begun and not ended is taken back, and its
    pause ends."""
    body = await body_of(AttendBody)(request)
    try:
        check_client(body.client)
    except ValueError as error:
        raise BadField("client", str(error)) from error
    return _OpenAnswer(request.app.state.attendance, body.client)
