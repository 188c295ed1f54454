"""Whole answers, which count as open until the client has read them."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PIECE = 1 << 18  # bytes that are sent at a time


class Answer(Response):
    """A JSON answer. A long one is sent in pieces, each after the client has read those before."""

    media_type = "application/json"

    def __init__(self, content: bytes, on_end: Callable[[], None]) -> None:
        """Prepare the answer. on_end: called once, when it is sent or the client has left."""
        super().__init__(content)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            rest = bytes(self.body)
            if len(rest) > _PIECE:
                for start in range(0, len(rest), _PIECE):
                    piece = rest[start : start + _PIECE]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                rest = b""  # the server takes a piece and waits before the next: this one waits for the last
            await send({"type": "http.response.body", "body": rest, "more_body": False})
        finally:
            self._on_end()
