"""The form of answers, and whole ones, which count as open until the client has read them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....rollout.completion import Completion
from .admission import Size
from .asked import Asked

_PIECE = 1 << 18  # bytes that are sent at a time


class Reply(Protocol):
    """One HTTP request for completions: its prompts for the engine, and the format of its answer."""

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of events."""

    @property
    def size(self) -> Size:
        """The size that counts in the limits of the queue."""

    def asked(self) -> Asked:
        """Tokenise and check the prompts. Runs in a thread, because it may take long. Raises BadField."""

    def cost(self, completions: Sequence[Completion]) -> int:
        """Return what `whole` and the encoding of its answer will cost, see `Encoder.run`."""

    def whole(self, completions: list[Completion]) -> object:
        """Make the JSON of an answer that is not streamed. Raises HttpError for a prompt that cannot run."""

    def events(self, subscription: Any) -> AsyncIterator[bytes]:
        """Make the events of an answer that is streamed, from the `Subscription`."""


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
