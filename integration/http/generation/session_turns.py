"""Requests on sessions: each is a turn that begins with the request and ends with its answer."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request
from fastapi.responses import Response

from ..conversations.next_turn import NextTurn
from ..conversations.params import SessionParams
from ..conversations.store import Sessions
from ..edge.session_paths import session_in
from .answers import Reply
from .asked import Asked
from .sse import EventStream
from .subscriptions import Hub


def begin_turn(request: Request, params: SessionParams | None, rid: str) -> NextTurn | None:
    """Begin a turn, which `answer_turn` ends; None: the request is on no session. Raises as `Sessions.begin`."""
    sessions: Sessions = request.app.state.conversations
    if params is None:
        return None
    return sessions.begin(params, rid, may_branch=session_in(request.scope) is not None)


def settled(asked: Asked, turn: NextTurn | None) -> Asked:
    """Return a request for the engine with the settings that its session has for all turns. Raises BadField."""
    if turn is None:
        return asked
    pairs = zip(asked.prompts, asked.params, strict=True)
    return replace(asked, params=[turn.sampling(prompt, params) for prompt, params in pairs])


async def answer_turn(hub: Hub, request: Request, reply: Reply, turn: NextTurn | None) -> Response:
    """Answer as `Hub.answer`, and end the turn with the answer, or with its failure."""
    if turn is None:
        return await hub.answer(request, reply)
    try:
        response = await hub.answer(request, reply)
    except BaseException:
        turn.end()
        raise
    if isinstance(response, EventStream):
        response.also_at_end(turn.end)
    else:
        turn.end()
    return response
