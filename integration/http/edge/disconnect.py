"""Cancellation of work whose client has disconnected, and answers that last as long as their connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Send

T = TypeVar("T")

HEARTBEAT_S = 15.0  # between two lines of an open answer: proxies close connections that are idle for a minute or so


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected. Call it only after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect."""
    working = asyncio.ensure_future(work)
    if not await first_of(working, until_disconnect(request.receive)):
        raise ClientDisconnect
    return working.result()


async def first_of(working: asyncio.Future[Any], other: Awaitable[object]) -> bool:
    """Wait until one of the two is done and cancel the other. Returns whether `working` is done."""
    watching = asyncio.ensure_future(other)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.done()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def keep_open(send: Send, ended: Awaitable[object]) -> None:
    """Send an empty line every HEARTBEAT_S until `ended` is done, so that nothing on the way takes the answer's
    connection for idle. The head of the answer has been sent."""
    waiting = asyncio.ensure_future(ended)
    try:
        while not (await asyncio.wait({waiting}, timeout=HEARTBEAT_S))[0]:
            await send({"type": "http.response.body", "body": b"\n", "more_body": True})
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
