"""The reading of a request: the chat that it is."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....rollout.engine import Engine
from ..chat.roles import BREAK
from ..chat.template import roles_of
from ..edge.bodies import fields_of
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from ..openai.body import OpenAIRequest, read_chat
from .fields import ResponsesBody, refuse_unsupported, refuse_values_of
from .items import read_input
from .places import Places
from .repeated import num_chars, repeated_fields
from .tools import ToolNames, translated_choice, translated_tools

ID = "resp_"  # the beginning of an answer's id
_MAX_ID = 256  # characters of a request_id
_SESSION = "session_params"
# Sets what a chat asks for in another way, or nothing.
_OWN = frozenset(ResponsesBody.model_fields) - {
    "model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "stream"
}  # fmt: skip

FirstMessage = Callable[[str, str], Mapping[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(OpenAIRequest):
    """A checked request, which is a chat."""

    repeated: Mapping[str, Any]  # fields of the answer that are the request's
    num_repeated: int  # characters of their JSON
    tool_names: ToolNames
    places: Places
    wants_logprobs: bool  # of the texts of the answer
    shows_logprobs: bool  # as a chat has them


def read_response(
    values: dict[str, object], engine: Engine, model: str, limits: RequestLimits, *, places: Places, first: FirstMessage
) -> ResponsesRequest:
    """Read and check the fields of a request. places: gets those of its values. first: returns the first message of a
    session's turn, see `_instructions`. Raises BadField, which may name a field of the chat: see `Places.renamed`."""
    refuse_unsupported(values)
    if values.get("input") is None:
        raise BadField("input", "is needed: a text, or a list of items")
    limits.long_lists({"input": values["input"]}, "input_ids", ("input",))
    body = fields_of(ResponsesBody, values)
    refuse_values_of(body)
    repeated = repeated_fields(values, body, limits)
    session = _session(values.get(_SESSION), body, places)
    messages = read_input(body.input, _instructions(body, session, first), places)
    fitted = roles_of(engine).fitted(messages, goes_on=body.previous_response_id is not None)
    messages, places.messages = fitted.messages, [places.messages[source] for source in fitted.sources]
    tools, names = translated_tools(body.tools)
    chat = {name: value for name, value in values.items() if name not in _OWN} | {
        "messages": messages,
        "tools": tools,
        "tool_choice": translated_choice(body.tool_choice, names),
        "response_format": _response_format(values, body, places),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.logprobs or body.wants_logprobs,
        "stream_options": {"include_usage": True},
        **_id_of(values),
        _SESSION: session,
    }
    places.is_translated = True
    read = read_chat(chat, engine, model, limits)
    return ResponsesRequest(
        **vars(read),
        repeated=repeated,
        num_repeated=num_chars(repeated),
        tool_names=names,
        places=places,
        wants_logprobs=body.wants_logprobs,
        shows_logprobs=body.logprobs,
    )


def _id_of(values: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of the chat that name it: the answer's id is the turn's of a session."""
    if values.get("rid") is not None:
        return {}
    own = values.get("request_id")
    if own is not None and (not isinstance(own, str) or not own or len(own) > _MAX_ID):
        return {}  # the chat refuses it
    return {"rid": f"{ID}{own or uuid.uuid4().hex}", "request_id": None}


def _session(given: object, body: ResponsesBody, places: Places) -> object:
    """Return the session_params of the chat. Raises BadField."""
    if (previous := body.previous_response_id) is None:
        return given
    if not isinstance(given, Mapping) or not given:
        raise BadField(
            "previous_response_id", "answers are kept in sessions alone: send session_params with the id of one, or "
            "the whole conversation as input"
        )  # fmt: skip
    if given.get("rid") not in (None, previous):
        raise BadField("session_params.rid", "names another turn than previous_response_id")
    places.names["session_params.rid"] = "previous_response_id"
    return {**given, "rid": previous, "messages": "new"}


def _instructions(body: ResponsesBody, session: object, first: FirstMessage) -> str | None:
    """Return the instructions that the messages begin with; None: there are none, or the session has them already.
    Raises BadField for others than the session's."""
    if body.instructions is None or body.previous_response_id is None or not isinstance(session, Mapping):
        return body.instructions
    id = session.get("id")
    known = first(id, body.previous_response_id) if isinstance(id, str) else None
    if known is None:
        return body.instructions
    content = known.get("content") if known.get("role") == "system" else None
    if isinstance(content, str) and f"{content}{BREAK}".startswith(body.instructions + BREAK):
        return None
    raise BadField(
        "instructions", "differ from those that the conversation of previous_response_id begins with, whose tokens "
        "stand: send the same, or none"
    )  # fmt: skip


def _response_format(values: Mapping[str, object], body: ResponsesBody, places: Places) -> object:
    """Return the response_format of the chat: that of `text`, or a chat's own. Raises BadField."""
    given: object = None if body.text is None else body.text.format
    own = values.get("response_format")
    if given is None:
        return own
    if own is not None:
        raise BadField("text.format", "and response_format: only one grammar can constrain an output")
    places.names["response_format"] = "text.format"
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind in ("text", "json_object"):
        return given
    if not isinstance(given, Mapping) or kind != "json_schema":
        raise BadField("text.format", 'needs the type "text", "json_object" or "json_schema"')
    if not isinstance(given.get("schema"), Mapping):
        raise BadField("text.format.schema", "must be a JSON schema, an object")
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
