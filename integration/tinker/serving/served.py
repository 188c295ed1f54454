"""The state of a server's application, and how its handlers read requests."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response

from ...http.edge.bodies import Body, arrived, fields_of, parsed
from ...http.edge.config import HttpConfig
from ...http.edge.errors import HttpError
from ..training.config import TinkerConfig
from ..training.trainer import Trainer
from .promises import Answer
from .sessions import Sessions

B = TypeVar("B", bound=Body)

_REMOVAL_S = 300.0  # between two looks for checkpoints that have expired


class Served:
    """The state that the handlers of one application share."""

    def __init__(self, trainer: Trainer, config: TinkerConfig, sessions: Sessions) -> None:
        self.config, self.sessions, self.checkpoints = config, sessions, trainer.checkpoints
        self.max_model_len = min(trainer.engine.max_model_len, trainer.engine.model.max_model_len)
        self._timer: asyncio.TimerHandle | None = None
        self._removal: asyncio.Future[None] | None = None  # of expired checkpoints, on a thread
        self._next_removal = time.monotonic()

    def check_base(self, name: str) -> None:
        """Raise HttpError 404 for a base model that is not served."""
        if name.rstrip("/") != self.config.model_name.rstrip("/"):
            raise HttpError(404, f"base_model {name[:200]!r} is not served; this server has {self.config.model_name!r}")

    def sweep_every(self, seconds: float) -> None:
        """End sessions that have gone silent, and remove expired checkpoints, now and then."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        self.sessions.sweep()
        if now >= self._next_removal and (self._removal is None or self._removal.done()):
            self._next_removal = now + _REMOVAL_S
            self._removal = loop.run_in_executor(None, self.checkpoints.remove_expired)
        self._timer = loop.call_later(seconds, self.sweep_every, seconds)

    def stop_sweeping(self) -> None:
        """End no more sessions, and remove no more checkpoints."""
        if self._timer is not None:
            self._timer.cancel()


def served_of(request: Request) -> Served:
    """Return the state of the request's application."""
    found: Served = request.app.state.served
    return found


async def read_bytes(request: Request) -> tuple[bytes, bytes]:
    """Return the body and its SHA-256. Raises HttpError for one that is too long, late, or compressed."""
    config: HttpConfig = request.app.state.config
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise HttpError(
            400, f"a body in the content encoding {encoding[:50]!r} is not taken: the server asked for none"
        )
    async with arrived(request, config.max_body_bytes) as data:
        return data, hashlib.sha256(data).digest()


def read(model: type[B]) -> Callable[[Request], Awaitable[tuple[B, bytes]]]:
    """Return a function that reads a request's JSON as `model`, and the SHA-256 of its body."""

    async def fields(request: Request) -> tuple[B, bytes]:
        data, digest = await read_bytes(request)
        max_lists = request.app.state.config.max_body_lists
        return await parsed(data, max_lists, lambda values: fields_of(model, values)), digest

    return fields


def respond(answer: Answer) -> Response:
    """Return an answer as a response."""
    return Response(answer.body, media_type=answer.media_type, headers=dict(answer.headers))
