"""POST /open_session and /close_session, with SGLang's fields, and GET /session_info."""

from __future__ import annotations

import json
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, StrictInt

from ..edge.bodies import Body, Timeout, describe, fields_of, read_as
from ..edge.errors import BadField
from .params import MAX_NAME, History, Name
from .sampling import NAMES, SessionSampling
from .session import Session, SessionOptions
from .store import Sessions
from .turns import messages_of, spans_of, tokens_of

router = APIRouter(tags=["sessions"])

_NEWEST = 1000  # turns that are listed


class OpenBody(Body):
    """Fields of POST /open_session."""

    session_id: Name | None = Field(None, description="default: a new one")
    capacity_of_str_len: Annotated[StrictInt, Field(ge=0)] | None = Field(
        None, description="SGLang's field; read, and changes nothing: the context and max_session_bytes are the limits"
    )
    streaming: bool = Field(False, description="one request at a time, each after the last turn")
    timeout: Timeout | None = Field(None, description="idle seconds after which it expires, at most session_idle_s")
    history: History = Field(
        "sampled",
        description="of a chat: the tokens of earlier turns as they stand, or as the template writes them now",
    )
    pin: bool = Field(False, description="keep the KV of the last turn in the cache, as far as pin_budget allows")
    sampling_params: dict[str, Any] | None = Field(
        None, description=f"settings of all turns, whatever their requests ask: {', '.join(NAMES)}; max_new_tokens is "
        "the most that a turn may have, and each turn has a seed made of sampling_seed and its prompt"
    )  # fmt: skip
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template where a request does not set them"
    )


class CloseBody(Body):
    """Fields of POST /close_session."""

    session_id: Annotated[str, Field(max_length=MAX_NAME)]


@router.post("/open_session", openapi_extra=describe(OpenBody), response_class=Response)
async def open_session(request: Request) -> Response:
    """Open a session, which keeps the tokens of a conversation as they were sent and sampled. Answers its id."""
    body = await _read(request, OpenBody)
    sampling = SessionSampling.of(body.sampling_params or {}, "sampling_params")
    variables = body.chat_template_kwargs or {}
    options = SessionOptions(body.streaming, body.timeout, body.history, body.pin, sampling, variables)
    return JSONResponse(_sessions(request).open(body.session_id, options).id)


@router.post("/close_session", openapi_extra=describe(CloseBody), response_class=Response)
async def close_session(request: Request) -> Response:
    """Close a session and forget its turns. Open requests on it are answered."""
    body = await _read(request, CloseBody)
    _sessions(request).close(body.session_id)
    return Response()


@router.get("/session_info", response_class=Response)
async def session_info(
    request: Request, session_id: str = "", rid: str | None = None, logprobs: bool = False
) -> Response:
    """Report a session, and the conversation up to one of its turns: token ids, the runs of them that were sampled with
    the weights' versions, and messages. rid: the turn; default: the last. logprobs: those of each run, as the answers
    reported them."""
    sessions = _sessions(request)
    session = sessions.find(session_id, "session_id")

    def made() -> bytes:
        # ASCII, for the arguments of a call may have half of a surrogate pair.
        return json.dumps(_report(sessions, session, rid, logprobs), allow_nan=False, separators=(",", ":")).encode()

    return Response(await request.app.state.reads.run(made), media_type="application/json")


def _report(sessions: Sessions, session: Session, rid: str | None, has_logprobs: bool) -> dict[str, Any]:
    num_pinned = sessions.num_pinned(session)
    with sessions.lock:
        turns = list(islice(reversed(session.turns.values()), _NEWEST))[::-1]
        last, options = session.last, session.options
        if rid is not None and rid not in session.turns:
            raise BadField("rid", f"the session {session.id!r} has no turn {rid!r}")
        turn = last if rid is None else session.turns[rid]
        found: dict[str, Any] = {
            "session_id": session.id, "streaming": options.streaming, "history": options.history, "pin": options.pin,
            "sampling_params": dict(options.sampling.values), "chat_template_kwargs": options.chat_template_kwargs,
            "num_pinned_blocks": num_pinned, "num_turns": len(session.turns), "num_bytes": session.num_bytes,
            "num_open_requests": len(session.open_rids), "seconds_left": sessions.seconds_left(session),
            "last_rid": None if last is None else last.rid, "leaves": session.leaves,
        }  # fmt: skip
    found["turns"] = [
        {"rid": one.rid, "parent_rid": None if one.parent is None else one.parent.rid, "num_tokens": one.num_tokens,
         "num_prompt_tokens": one.num_prompt, "num_history_tokens": one.num_kept, "finish_reason": one.finish}
        for one in turns
    ]  # fmt: skip
    if turn is not None:
        found |= {"rid": turn.rid, "token_ids": tokens_of(turn), "sampled": spans_of(turn, has_logprobs=has_logprobs)}
        found["messages"] = None if turn.messages is None else messages_of(turn)
    return found


async def _read(request: Request, model: type[Any]) -> Any:
    limit = request.app.state.config.max_control_body_bytes
    return await read_as(request, lambda values: fields_of(model, values), limit)


def _sessions(request: Request) -> Sessions:
    return request.app.state.conversations
