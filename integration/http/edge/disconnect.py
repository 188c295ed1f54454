"""Work for a client ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

T = TypeVar("T")


async def until_disconnect(receive: Receive) -> None:
    """Return when the client is gone. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Where the client leaves before, it is cancelled; raises ClientDisconnect then."""
    working = asyncio.ensure_future(work)
    if not await first_of(working, until_disconnect(request.receive)):
        raise ClientDisconnect
    return working.result()


async def first_of(working: asyncio.Future[Any], other: Awaitable[object]) -> bool:
    """Wait for either and cancel the other one; returns whether it was `working` that is done."""
    watching = asyncio.ensure_future(other)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.done()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
