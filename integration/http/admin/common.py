"""Parts that administrative endpoints share: registration, stages, operations, and replies."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ...plain_values import plain
from ...service import RolloutService
from ..edge.bodies import AdminBody, body_of, describe
from ..edge.errors import BadField

T = TypeVar("T")
Endpoint = Callable[..., Any]
SELECTORS = ("target", "draft", "all")
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request is wrong, or the engine's state does not allow it; the message says which"},
    401: {"description": "no usable key"},
    403: {"description": "the wrong key"},
    408: {
        "description": "the deadline passed before the call began, as while a trainer has the module; it will not run"
    },
    409: {"description": "another update is in progress"},
    413: {"description": "the body is too long"},
    503: {"description": "the engine's loop has ended, or is ending"},
}


def endpoint(
    router: APIRouter,
    path: str,
    body: type[AdminBody],
    *,
    methods: Sequence[str] = ("POST",),
    carries_data: bool = True,
    read: Callable[[Request], Awaitable[AdminBody]] | None = None,
) -> Callable[[Endpoint], Endpoint]:
    """Register `handler(request, body)`. Each method is an operation of its own in the API's description.

    carries_data: see `bodies.body_of`, which reads the body unless `read` does.
    """

    reader = read or body_of(body, carries_data=carries_data)

    def register(handler: Callable[[Request, Any], Any]) -> Endpoint:
        async def call(request: Request) -> Response:
            return await handler(request, await reader(request))

        for method in methods:
            router.add_api_route(
                path, call, methods=[method], name=handler.__name__, description=handler.__doc__,
                operation_id=f"{handler.__name__}_{method.lower()}_{path.strip('/').replace('/', '_')}",
                openapi_extra=describe(body) if method != "GET" else None, response_class=Response,
            )  # fmt: skip
        return handler

    return register


def service_of(request: Request) -> RolloutService:
    """Return the service behind the server that received the request."""
    return request.app.state.service


async def run(request: Request, body: AdminBody, call: Callable[[float | None], T]) -> T:
    """Run `call(seconds_left)` on a thread, under the body's op_id and deadline, and return its result."""
    arguments = body.model_dump(exclude={"op_id", "timeout_s"}) if body.op_id is not None else None
    return await request.app.state.operations.run(
        request.scope["path"], call, op_id=body.op_id, timeout_s=body.timeout_s, arguments=arguments
    )


async def run_update(request: Request, body: AdminBody, call: Callable[[float | None], T]) -> T:
    """Run a call that writes weights, and return its result. Raises Busy while another one runs. Where a trainer owns
    the module, the call waits for a rollout phase, until its deadline."""
    gate, service, verb = request.app.state.updates, service_of(request), request.scope["path"].lstrip("/")

    def alone(seconds_left: float | None) -> T:
        with gate.enter(verb), service.weights_turn(verb, seconds_left) as still_left:
            return call(still_left)

    return await run(request, body, alone)


def verb(
    router: APIRouter,
    body: type[AdminBody],
    *,
    writes: bool = False,
    reply: Callable[..., Response] | None = None,
) -> Callable[[Callable[[RolloutService, Any, float | None], Any]], Endpoint]:
    """Register `handler(service, body, seconds_left)`, which may block, as POST /<its name>.

    writes: the handler writes weights, see `run_update`. reply: makes the reply from the handler's result and, by name,
    each rank's result (`rank_results`); None: a triple with the handler's result as the report.
    """

    def register(handler: Callable[[RolloutService, Any, float | None], Any]) -> Endpoint:
        async def answer(request: Request, body: AdminBody) -> Response:
            if (skip := skipped(request, body)) is not None:
                return skip
            service = service_of(request)

            def work(seconds_left: float | None) -> tuple[Any, dict[str, Any]]:
                service.replica.note_outside_call()
                return handler(service, body, seconds_left), rank_results(service)

            report, results = await (run_update if writes else run)(request, body, work)
            return reply(report, **results) if reply is not None else triple("Success", report, **results)

        answer.__name__, answer.__doc__ = handler.__name__, handler.__doc__
        return endpoint(router, f"/{handler.__name__}", body)(answer)

    return register


def skipped(request: Request, body: AdminBody) -> Response | None:
    """Make the answer of an engine that the body's `stages` or `selector` excludes; None if it is selected.

    Raises BadField for an unknown selector.
    """
    stage = request.app.state.config.stage
    if body.stages and stage not in body.stages:
        return _skip(f"stage {stage!r} was not selected")
    selector = getattr(body, "selector", "all")
    if selector not in SELECTORS:
        raise BadField("selector", f"must be one of {', '.join(SELECTORS)}")
    return _skip("this engine has no draft model") if selector == "draft" else None


def _skip(why: str) -> Response:
    return json_response({"success": True, "skipped": True, "message": f"skipped: {why}"})


def json_response(value: object, status: int = 200) -> JSONResponse:
    """Make a JSON response of any report; NaN and infinities become texts, because JSON has neither."""
    return JSONResponse(finite(plain(value)), status)


def triple(message: str, report: object = None, **extra: object) -> JSONResponse:
    """Make the reply of a weight verb that succeeded; a verb that fails raises an exception instead."""
    return json_response({"success": True, "message": message, **extra, "report": report})


def rank_results(service: RolloutService) -> dict[str, Any]:
    """Return each rank's result of the last call that this thread sent to all ranks, as a field of the reply."""
    results = service.replica.take_results()
    return {"rank_results": results} if results else {}


def finite(value: object) -> object:
    """Return a plain value with texts in place of NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value
