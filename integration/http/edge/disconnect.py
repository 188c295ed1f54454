"""Cancellation of work whose client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

T = TypeVar("T")


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
