"""The conversation of a request: system texts and messages of content blocks, as the messages of a chat.

    user       tool_result, tool_result, text, image      ->  tool, tool, user
    assistant  thinking, text, tool_use, tool_use         ->  assistant with reasoning_content, content and tool_calls

Texts beside each other become one, with a line break between them where a user, a system or a tool wrote them: as they
stand where the model did, whose answer was divided into blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....rollout.giving_way import give_way
from ..chat.roles import Roles
from ..edge.errors import BadField

Block = Mapping[str, Any]
Message = dict[str, Any]

_ROLES = ("user", "assistant", "system")
_BREAK = "\n"
_REFUSED = "is not supported: only {} are read here"
_IMAGE_SOURCES = '{"type": "base64", "media_type": ..., "data": ...}'


@dataclass(frozen=True)
class Conversation:
    """The messages of a chat, and where the request has what became each of them."""

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    parts: dict[tuple[int, int], str] = field(default_factory=dict)  # of images, by message and part of its content

    def add(self, message: Message, place: str) -> None:
        """Add a message. place: that of what it was made of."""
        self.messages.append(message)
        self.places.append(place)

    def fitted(self, roles: Roles) -> Conversation:
        """Return the conversation that a chat template writes."""
        fitted = roles.fitted(self.messages)
        number_of = {source: number for number, source in enumerate(fitted.sources)}
        parts = {(number_of[of], part): at for (of, part), at in self.parts.items()}
        return Conversation(fitted.messages, [self.places[source] for source in fitted.sources], parts)

    def place(self, param: str) -> str:
        """Return the field of the request that a field of the chat's messages was made of."""
        head, _, rest = param.partition(".")
        number, _, inner = rest.partition(".")
        if head != "messages" or not number.isdecimal() or int(number) >= len(self.places):
            return param
        own = self.places[int(number)]
        if not inner or own == "system":
            return own
        _, _, part = inner.partition(".")
        part = part.partition(".")[0]
        if part.isdecimal() and (int(number), int(part)) in self.parts:
            return f"{self.parts[int(number), int(part)]}.source"
        return f"{own}.{inner}"


def read_conversation(system: object, messages: object) -> Conversation:
    """Return the messages of a chat. Raises BadField."""
    found = Conversation()
    if (text := _system_text(system, "system")) is not None:
        found.add({"role": "system", "content": text}, "system")
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "must be a list of messages, at least one")
    for index, message in enumerate(messages):
        give_way()
        place = f"messages.{index}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise BadField(place, f"must be an object with a role, one of {', '.join(_ROLES)}")
        content = message.get("content")
        if role == "system":
            text = _system_text(content, f"{place}.content")
            found.add({"role": role, "content": text or ""}, place)
        elif role == "user":
            _add_user(found, content, place)
        else:
            found.add(_assistant(content, place), place)
    return found


def is_begun(messages: object) -> bool:
    """Return whether the last message is the beginning of the answer."""
    return isinstance(messages, list) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


def _system_text(content: object, place: str) -> str | None:
    if content is None or isinstance(content, str):
        return content or None
    return _BREAK.join(_read(block, {"text": _text}) for block in _blocks(content, place)) or None


def _add_user(found: Conversation, content: object, place: str) -> None:
    """Add the messages of a user's message: one for each result of a tool, and what stands between those."""
    if isinstance(content, str):
        found.add({"role": "user", "content": content}, place)
        return
    waiting: list[tuple[str, Block]] = []  # texts and images that become one message
    for at, block in _blocks(content, f"{place}.content"):
        if block.get("type") != "tool_result":
            waiting.append((at, block))
            continue
        if waiting:
            _add_parts(found, {"role": "user"}, waiting, place)
        waiting = []
        _add_result(found, block, at)
    if waiting:
        _add_parts(found, {"role": "user"}, waiting, place)


def _add_result(found: Conversation, block: Block, at: str) -> None:
    call, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call, str):
        raise BadField(f"{at}.tool_use_id", "must be the id of a tool_use")
    message = {"role": "tool", "tool_call_id": call}
    if content is None or isinstance(content, str):
        found.add({**message, "content": content or ""}, at)
    else:
        _add_parts(found, message, list(_blocks(content, f"{at}.content")), at)


def _add_parts(found: Conversation, message: Message, blocks: list[tuple[str, Block]], place: str) -> None:
    """Add a message of texts and images: with one text as content, or with parts where it has images."""
    parts = [_read((at, block), {"text": _text_part, "image": _image_part}) for at, block in blocks]
    if all(part["type"] == "text" for part in parts):
        found.add({**message, "content": _BREAK.join(part["text"] for part in parts)}, place)
        return
    number = len(found.messages)
    found.parts.update({(number, index): at for index, (at, _) in enumerate(blocks)})
    found.add({**message, "content": parts}, place)


def _assistant(content: object, place: str) -> Message:
    """Return an answer of the model as a chat has it."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    kinds: dict[str, Callable[[Block, str], None]] = {
        "text": lambda block, at: texts.append(_text(block, at)),
        "thinking": lambda block, at: thoughts.append(_text(block, at, "thinking")),
        "tool_use": lambda block, at: calls.append(_call(block, at)),
    }
    for one in _blocks(content, f"{place}.content"):
        _read(one, kinds)
    found: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _call(block: Block, at: str) -> dict[str, Any]:
    for name, kind, what in (("id", str, "a text"), ("name", str, "a text"), ("input", dict, "an object")):
        if not isinstance(block.get(name), kind):
            raise BadField(f"{at}.{name}", f"must be {what}")
    try:
        arguments = json.dumps(block["input"], ensure_ascii=False)
    except RecursionError:
        raise BadField(f"{at}.input", "nested too deeply") from None
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _text(block: Block, at: str, name: str = "text") -> str:
    if not isinstance(text := block.get(name), str):
        raise BadField(f"{at}.{name}", "must be a text")
    return text


def _text_part(block: Block, at: str) -> dict[str, Any]:
    return {"type": "text", "text": _text(block, at)}


def _image_part(block: Block, at: str) -> dict[str, Any]:
    given = block.get("source")
    source: dict[str, Any] = given if isinstance(given, dict) else {}
    kind = source.get("type")
    if kind == "url" and isinstance(url := source.get("url"), str):
        return {"type": "image_url", "image_url": {"url": url}}
    if kind != "base64" or not isinstance(source.get("data"), str) or not isinstance(source.get("media_type"), str):
        raise BadField(f"{at}.source", f"must be {_IMAGE_SOURCES}")
    if block.get("transformations"):
        raise BadField(f"{at}.transformations", "are not supported: the processor's settings say how images are read")
    return {"type": "image_url", "image_url": {"url": f"data:{source['media_type']};base64,{source['data']}"}}


def _blocks(content: object, place: str) -> list[tuple[str, Block]]:
    """Return the blocks of a content, each with its place. Raises BadField."""
    if not isinstance(content, list):
        raise BadField(place, "must be a text or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise BadField(f"{place}.{index}", "must be an object with a type")
    return [(f"{place}.{index}", block) for index, block in enumerate(content)]


def _read(one: tuple[str, Block], kinds: Mapping[str, Callable[[Block, str], Any]]) -> Any:
    """Return what the reader of a block's type makes of it. Raises BadField for other types."""
    at, block = one
    read = kinds.get(block["type"])
    if read is None:
        raise BadField(at, f"a block of the type {block['type'][:100]!r} {_REFUSED.format(', '.join(kinds))}")
    return read(block, at)
