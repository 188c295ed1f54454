"""Server-sent events, and JSON that grows: each chunk repeats the earlier output, but only new parts are encoded."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..edge.disconnect import first_of, until_disconnect

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # made once, not for each token
_TURN_S = 0.005  # a stream runs no longer at a time
MAX_TAKEN_BACK = 256  # entries of a list; a jump replaces at most so many tokens
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def dumps(value: object) -> str:
    """Encode a value as compact JSON in ASCII. Raises ValueError for NaN and infinity, which JSON does not have."""
    return _ENCODER.encode(value)


def event(data: str) -> bytes:
    """Make one event; the data is one line."""
    return f"data: {data}\n\n".encode()


class GrowingList:
    """The JSON of a list to which entries are added."""

    def __init__(self) -> None:
        self._inside = ""
        self._newest: deque[int] = deque(maxlen=MAX_TAKEN_BACK)  # lengths before each of the last entries

    def extend(self, values: Iterable[object]) -> None:
        parts = [self._inside] if self._inside else []
        length = len(self._inside)
        for value in values:
            self._newest.append(length)
            parts.append(dumps(value))
            length += len(parts[-1]) + (len(parts) > 1)
        self._inside = ",".join(parts)

    def take_back(self, num: int) -> None:
        """Remove the last entries, at most MAX_TAKEN_BACK."""
        for _ in range(num):
            self._inside = self._inside[: self._newest.pop()]

    def __str__(self) -> str:
        return f"[{self._inside}]"


class GrowingText:
    """The JSON of a text to which characters are added."""

    def __init__(self) -> None:
        self._inside = ""

    def append(self, text: str) -> None:
        self._inside += dumps(text)[1:-1]

    def __str__(self) -> str:
        return f'"{self._inside}"'


class EventStream(Response):
    """A response that sends events as they are made, and stops when the client disconnects: also between two events,
    for example while generation is paused."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        """Prepare the stream. on_end: called once, for every kind of end."""
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sending = asyncio.ensure_future(self._send_all(send))
            if await first_of(sending, until_disconnect(receive)):
                sending.result()
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        since = time.monotonic()
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if time.monotonic() - since > _TURN_S:  # many events may be ready: others have their turn
                await asyncio.sleep(0)
                since = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
