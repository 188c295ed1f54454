"""The messages of a chat, and a predicted answer."""

from __future__ import annotations

import json
from typing import Any

from ..edge.errors import BadField

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_WITH_CONTENT = ("system", "developer", "user", "tool")  # roles whose messages are nothing without content


def read_message(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the message with one text as content, an empty one for null, and with objects as arguments of its calls.
    field: the message's place in the request. Raises BadField for content or calls that are none."""
    role = message.get("role")
    if not isinstance(role, str):
        raise BadField(f"{field}.role", "each message needs a role")
    found = dict(message)
    if message.get("content") is None and role in _WITH_CONTENT:
        raise BadField(f"{field}.content", f"a message of the role {role} needs content")
    if "content" in message:
        found["content"] = _text(message["content"], f"{field}.content") or ""  # templates add to a text
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        found.pop("reasoning_content", None)  # templates add to a text
    elif not isinstance(reasoning, str):
        raise BadField(f"{field}.reasoning_content", "must be a text")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None and not isinstance(message[name], str):
            raise BadField(f"{field}.{name}", "must be a text")
    calls = message.get("tool_calls")
    if not calls:
        found.pop("tool_calls", None)
    elif isinstance(calls, list):
        found["tool_calls"] = [_call(call, f"{field}.tool_calls.{index}") for index, call in enumerate(calls)]
        found.setdefault("content", "")
    else:
        raise BadField(f"{field}.tool_calls", "must be a list")
    return found


def with_texts_as_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the JSON of the arguments of their calls, which some templates expect."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _call(call: object, field: str) -> dict[str, Any]:
    """Return a call of a message with an object as arguments. field: the call's place in the request. Raises
    BadField."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadField(field, 'must be {"type": "function", "function": {"name": ...}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise BadField(f"{field}.function.arguments", f"are no JSON: {error}") from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def read_prediction(prediction: dict[str, Any] | None) -> str | None:
    """Return the text of a prediction. Raises BadField."""
    if prediction is None:
        return None
    if prediction.get("type") != "content" or prediction.get("content") is None:
        raise BadField("prediction", 'needs the type "content", and content')
    return _text(prediction["content"], "prediction")


def _text(content: Any, field: str) -> str | None:
    """Return content, a text or parts that are texts, as one text. Raises BadField."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
    if other := sorted({str(kind) for kind in kinds if kind != "text"}):
        raise BadField(field, f"content of the type {', '.join(other)}: only the type text is supported")
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    if len(texts) < len(parts):
        raise BadField(field, "content of the type text without a text")
    return "".join(texts)
