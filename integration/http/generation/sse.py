"""Server-sent events, and JSON that grows: each chunk repeats the earlier output, but only new parts are encoded."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncIterator, Callable, Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..edge.disconnect import first_of, until_disconnect
from ..edge.json_slices import encode_in_slices

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # made once, not for each token
Piece = bytes | bytearray
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def dumps(value: object) -> str:
    """Encode a value as compact JSON in ASCII. Raises ValueError for NaN and infinity, which JSON does not have."""
    return _ENCODER.encode(value)


def event(data: str) -> bytes:
    """Make one event; the data is one line."""
    return f"data: {data}\n\n".encode()


def event_of(value: object) -> bytes:
    """Make one event of a value as `dumps` encodes it, in pieces between which other threads run."""
    return event("".join(encode_in_slices(value, dumps)))


class GrowingList:
    """The JSON of a list to which entries are added. Adding takes no longer where the list is long."""

    def __init__(self) -> None:
        self._json = bytearray()  # without brackets; ASCII
        self._starts = array("q")  # of the entries, with the comma before each: a commit may take all of them back

    def extend(self, values: Iterable[object]) -> None:
        for value in values:
            self._starts.append(len(self._json))
            if self._json:
                self._json += b","
            self._json += dumps(value).encode()

    def take_back(self, num: int) -> None:
        """Remove the last entries."""
        if num:
            del self._json[self._starts[-num] :]
            del self._starts[-num:]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The JSON in pieces, which hold until the next change."""
        return (b"[", self._json, b"]")

    def __len__(self) -> int:
        """Return the number of bytes, about."""
        return len(self._json)


class GrowingText:
    """The JSON of a text to which characters are added."""

    def __init__(self) -> None:
        self._json = bytearray()  # without quotes; ASCII

    def append(self, text: str) -> None:
        self._json += dumps(text)[1:-1].encode()

    def take_back(self, num_chars: int) -> None:
        """Remove the last characters."""
        text: str = json.loads(b'"' + self._json + b'"')
        self._json = bytearray(dumps(text[: len(text) - num_chars])[1:-1].encode())

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The JSON in pieces, which hold until the next change."""
        return (b'"', self._json, b'"')

    def __len__(self) -> int:
        """Return the number of bytes, about."""
        return len(self._json)


class EventStream(Response):
    """A response that sends events as they are made, and stops when the client disconnects: also between two events,
    for example while generation is paused. `events` waits for the event loop's other work by itself, see `Encoder`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        """Prepare the stream. on_end: called once, for every kind of end."""
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    def also_at_end(self, call: Callable[[], None]) -> None:
        """Call this too when the stream ends, before what is called already."""
        former = self._on_end

        def both() -> None:
            try:
                call()
            finally:
                former()

        self._on_end = both

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sending = asyncio.ensure_future(self._send_all(send))
            if await first_of(sending, until_disconnect(receive)):
                sending.result()
        except asyncio.CancelledError:  # only the server's end cancels: the connection is closed with it
            logger.warning("a stream is cut off, because the server ends")
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
