"""The paths by which a client begins, stays, asks for answers and ends."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ...http.edge.errors import HttpError
from ..wire.bodies import FutureBody, HeartbeatBody, SessionBody
from .served import read, read_bytes, respond, served_of

router = APIRouter()

# What the SDK is told. The other flags of its ClientConfigResponse have their defaults: custom losses on the server and
# one poll for many answers are off.
_CLIENT_CONFIG: dict[str, object] = {
    "pjwt_auth_enabled": False,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "proto_compress_fwdbwd": False,
    "sample_join_sampling_session": True,
}
_DYNAMIC_CONFIG: dict[str, object] = {"sample_cancel_enabled": True}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer while the server runs."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(request: Request) -> dict[str, object]:
    """Name the base model, and what it can do."""
    served = served_of(request)
    model = {"model_name": served.config.model_name, "max_context_length": served.max_model_len}
    return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


@router.post("/client/config")
async def client_config(request: Request) -> dict[str, object]:
    """Tell the SDK which parts of the API to use."""
    await read_bytes(request)
    return _CLIENT_CONFIG


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request) -> dict[str, object]:
    """Tell the SDK the flags that it asks for again and again."""
    await read_bytes(request)
    return _DYNAMIC_CONFIG


@router.post("/telemetry")
async def telemetry(request: Request) -> dict[str, str]:
    """Accept telemetry, and drop it: nothing leaves this machine."""
    await read_bytes(request)
    return {"status": "accepted"}


@router.post("/create_session")
async def create_session(request: Request) -> dict[str, object]:
    """Open a session."""
    body, _ = await read(SessionBody)(request)
    session = served_of(request).sessions.open(body.display_name, body.user_metadata)
    return {"type": "create_session", "session_id": session.session_id}


@router.post("/session_heartbeat")
async def heartbeat(request: Request) -> dict[str, object]:
    """Keep a session open."""
    body, _ = await read(HeartbeatBody)(request)
    served_of(request).sessions.get(body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish(request: Request, session_id: str) -> Response:
    """End a session. One that has ended already is no error."""
    await read_bytes(request)
    served_of(request).sessions.end(session_id)
    return Response(status_code=204)


@router.post("/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """Return the answer to a request once it is there. Else the client is told to ask again."""
    body, _ = await read(FutureBody)(request)
    served = served_of(request)
    served.sessions.get(body.request_id.partition(":")[0])
    promise = served.sessions.promises.get(body.request_id)
    if promise is None:
        raise HttpError(410, f"request {body.request_id} is not known any more", code="gone")
    answer = await served.sessions.promises.fetch(promise, served.config.poll_s)
    if answer is None:
        again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return JSONResponse(again, 408)
    return respond(answer.accepted_by(request.headers.get("accept", "")))


@router.post("/cancel_future")
async def cancel_future(request: Request) -> Response:
    """Cancel a request for samples. One that is answered already is no error."""
    body, _ = await read(FutureBody)(request)
    served_of(request).sessions.cancel(body.request_id)
    return Response(status_code=204)
