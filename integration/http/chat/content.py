"""The messages of a chat, with texts and images, and a predicted answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..edge.errors import BadField
from ..edge.nesting import parse_text
from ..images.pictures import SentPicture

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_WITH_CONTENT = ("system", "developer", "user", "tool")  # roles whose messages are nothing without content


IMAGE_URL = "image_url"
_SIZES = ("max_dynamic_patch", "min_dynamic_patch", "max_long_side_pixel")  # of an image, in SGLang's chats


class Images:
    """The images of a chat, in order."""

    def __init__(self, read: Callable[[object, str], SentPicture]) -> None:
        """Begin with none. read: reads an address, at its place in the request; raises BadField."""
        self._read = read
        self.pictures: list[SentPicture] = []

    def add(self, part: dict[str, Any], field: str) -> None:
        """Add the image of a part of a message. Its `detail` changes nothing: the processor's settings say how large an
        image is. Raises BadField, also for what would change them."""
        given, place = part.get(IMAGE_URL), f"{field}.{IMAGE_URL}"
        if isinstance(given, dict):
            if set_anew := [name for name in _SIZES if given.get(name) is not None]:
                raise BadField(
                    f"{place}.{set_anew[0]}", "is not supported: the processor's settings say how large it is"
                )
            given, place = given.get("url"), f"{place}.url"
        self.pictures.append(self._read(given, place))


def read_message(message: dict[str, Any], field: str, images: Images | None = None) -> dict[str, Any]:
    """Return the message with one text as content, an empty one for null, and with objects as arguments of its calls.
    Content with images stays a list of parts, as chat templates read it. field: the message's place in the request;
    images: takes them, None: there may be none. Raises BadField for content or calls that are none."""
    role = message.get("role")
    if not isinstance(role, str):
        raise BadField(f"{field}.role", "each message needs a role")
    found = dict(message)
    if message.get("content") is None and role in _WITH_CONTENT:
        raise BadField(f"{field}.content", f"a message of the role {role} needs content")
    if "content" in message:
        found["content"] = _content(message["content"], f"{field}.content", images) or ""  # templates add to a text
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
            arguments = parse_text(arguments or "{}")
        except ValueError as error:
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
    text = _content(prediction["content"], "prediction", None)
    assert not isinstance(text, list), "there are no images"
    return text


def _content(content: Any, field: str, images: Images | None) -> str | list[dict[str, str]] | None:
    """Return content, a text or parts, as one text where it has no images. Raises BadField."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    known = ("text",) if images is None else ("text", IMAGE_URL)
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
    if other := sorted({str(kind) for kind in kinds if kind not in known}):
        named = f"only the type text{' or image_url' * (images is not None)} is supported"
        raise BadField(field, f"content of the type {', '.join(other)[:200]}: {named}")
    found: list[dict[str, str]] = []
    for index, part in enumerate(parts):
        if part["type"] == IMAGE_URL:
            assert images is not None
            images.add(part, f"{field}.{index}")
            found.append({"type": "image"})
        elif isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        else:
            raise BadField(field, "content of the type text without a text")
    if any(part["type"] == "image" for part in found):
        return found
    return "".join(part["text"] for part in found)


def texts_of(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message that was read: of its content, and of its reasoning."""
    content = message.get("content")
    parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    return [text for text in (*parts, message.get("reasoning_content")) if isinstance(text, str)]
