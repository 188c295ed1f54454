"""Numbered calls of models that are refused before they are queued.

Later requests of a model wait for the number of each earlier one. So a refusal is the answer under the number of its
request, where that can be read; a client gets it as any other answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from ...http.edge.bodies import Body, fields_of, parsed
from ...http.edge.errors import HttpError, as_http_error, forget_frames
from ..training.trainer import Trainer
from .served import read_bytes, served_of

B = TypeVar("B", bound=Body)

_FINAL = frozenset({400, 404, 413})  # statuses after which the SDK does not send a request again


@dataclass(frozen=True)
class _Call:
    model_id: str
    seq_id: int
    digest: bytes


class CallRoute(APIRoute):
    """A route of calls: a refusal of one that `note_call` knows is queued as its answer."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except (HttpError, ValueError) as error:
                call: _Call | None = getattr(request.state, "call", None)
                if call is None or as_http_error(error).status not in _FINAL:
                    raise
                return JSONResponse(_queue_refusal(request, call, error))

        return answer


def note_call(request: Request, model_id: object, seq_id: object, digest: bytes) -> None:
    """Note the number of a request, if it has one. digest: of its body."""
    if isinstance(model_id, str) and type(seq_id) is int and seq_id >= 1:
        request.state.call = _Call(model_id, seq_id, digest)


def read_call(model: type[B]) -> Callable[[Request], Awaitable[tuple[B, bytes]]]:
    """Return a function as `read` does, which notes the request's number before it checks the other fields."""

    async def fields(request: Request) -> tuple[B, bytes]:
        data, digest = await read_bytes(request)

        def checked(values: dict[str, object]) -> B:
            note_call(request, values.get("model_id"), values.get("seq_id"), digest)
            return fields_of(model, values)

        return await parsed(data, request.app.state.config.max_body_lists, checked), digest

    return fields


def _queue_refusal(request: Request, call: _Call, error: Exception) -> dict[str, object]:
    """Queue a refusal. Raises HttpError for a model that is not there, and for a number that was used."""
    sessions = served_of(request).sessions
    model = sessions.model(call.model_id)
    forget_frames(error)

    def refuse(trainer: Trainer) -> NoReturn:
        raise error

    promise = sessions.submit(model, call.seq_id, call.digest, refuse)
    return {"request_id": promise.request_id, "model_id": call.model_id}
