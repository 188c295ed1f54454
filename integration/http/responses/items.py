"""The items of a request's input, as the messages of a chat.

Items of the assistant that follow one another are one message, as the chat's answer was that they came from, unless
their ids say that they are of several answers:

    user | reasoning, message, function_call, function_call | function_call_output | function_call_output | message
    user | assistant                                        | tool                 | tool                 | assistant
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....rollout.giving_way import give_way
from ..edge.errors import BadField
from .output import answer_of
from .places import MessagePlace, Places
from .tools import custom_arguments, joined

Message = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text")
_THOUGHTS = {"content": ("reasoning_text", "text"), "summary": ("summary_text", "text")}  # of a reasoning item
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass
class _Assistant:
    """An assistant's message whose items are read."""

    place: MessagePlace
    answer: str | None = None  # that its items are of, once an id says so
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> Message:
        """The message of all items so far."""
        found: Message = {"role": "assistant", "content": "".join(self.texts) or None}
        if thoughts := "".join(self.thoughts):
            found["reasoning_content"] = thoughts
        if self.calls:
            found["tool_calls"] = self.calls
        return found


def read_input(given: str | list[Any], instructions: str | None, places: Places) -> list[Message]:
    """Return the messages of the chat. places: gets theirs. Raises BadField."""
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        places.messages.append(MessagePlace("instructions"))
    if isinstance(given, str):
        places.messages.append(MessagePlace("input"))
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise BadField("input", "must not be empty")
    reader = _Reader(messages, places)
    for index, item in enumerate(given):
        give_way()
        reader.read(item, f"input.{index}")
    reader.end_assistant()
    return messages


class _Reader:
    """The reading of items one after the other."""

    def __init__(self, messages: list[Message], places: Places) -> None:
        """Begin. messages: are added to."""
        self._messages, self._places = messages, places
        self._open: _Assistant | None = None

    def read(self, item: object, place: str) -> None:
        """Read an item. Raises BadField."""
        if not isinstance(item, dict):
            raise BadField(place, f"must be an object, not {type(item).__name__}")
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if kind == "message" and item.get("role") != "assistant":
            self._message(item, place)
        elif isinstance(kind, str) and kind in _CALL_OUTPUTS:
            self._call_output(item, place)
        elif isinstance(kind, str) and kind in _OF_ASSISTANT:
            _OF_ASSISTANT[kind](self._assistant(answer_of(item.get("id")), place), item, place)
        else:
            raise BadField(place, f"items of the type {_shown(kind)} are not supported: send the conversation itself")

    def _assistant(self, answer: str | None, place: str) -> _Assistant:
        """Return the message of an item of this answer; None: the item does not say of which one it is."""
        if self._open is not None and answer is not None and self._open.answer not in (None, answer):
            self.end_assistant()
        if self._open is None:
            self._open = _Assistant(MessagePlace(place))
        self._open.answer = self._open.answer or answer
        return self._open

    def end_assistant(self) -> None:
        """End the assistant's message, if one is open."""
        if self._open is not None:
            self._add(self._open.message, self._open.place)
            self._open = None

    def _add(self, message: Message, place: MessagePlace) -> None:
        self._messages.append(message)
        self._places.messages.append(place)

    def _message(self, item: dict[str, Any], place: str) -> None:
        self.end_assistant()
        role = item.get("role")
        if not isinstance(role, str):
            raise BadField(f"{place}.role", "must be a text")
        if role in ("tool", "function"):
            raise BadField(f"{place}.role", f"an output of a call is an item of the type {_CALL_OUTPUTS[0]}")
        content = _content(item.get("content"), f"{place}.content")
        self._add({"role": role, "content": content}, MessagePlace(place, f"{place}.content"))

    def _call_output(self, item: dict[str, Any], place: str) -> None:
        self.end_assistant()
        message = {"role": "tool", "tool_call_id": _text(item, "call_id", place)}
        content = _content(item.get("output"), f"{place}.output")
        self._add({**message, "content": content}, MessagePlace(place, f"{place}.output"))


def _assistant_message(open: _Assistant, item: dict[str, Any], place: str) -> None:
    content = _content(item.get("content"), f"{place}.content")
    if not isinstance(content, str):
        raise BadField(f"{place}.content", "an assistant's message has texts alone")
    open.texts.append(content)


def _reasoning(open: _Assistant, item: dict[str, Any], place: str) -> None:
    for name, kinds in _THOUGHTS.items():
        parts = item.get(name)
        if not parts:
            continue
        if not isinstance(parts, list):
            raise BadField(f"{place}.{name}", "must be a list")
        open.thoughts += [_part_text(part, kinds, f"{place}.{name}.{at}") for at, part in enumerate(parts)]
        return
    if item.get("encrypted_content"):
        raise BadField(f"{place}.encrypted_content", "is another server's: here thoughts are texts, in content")


def _function_call(open: _Assistant, item: dict[str, Any], place: str) -> None:
    _add_call(open, item, place, _name(item, place), _text(item, "arguments", place))


def _custom_call(open: _Assistant, item: dict[str, Any], place: str) -> None:
    arguments = custom_arguments(_text(item, "input", place))
    _add_call(open, item, place, _name(item, place), arguments)


def _name(item: dict[str, Any], place: str) -> str:
    """Return the name in the chat of the tool that an item calls."""
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise BadField(f"{place}.namespace", "must be a text")
    return joined(namespace, _text(item, "name", place))


def _add_call(open: _Assistant, item: dict[str, Any], place: str, name: str, arguments: str) -> None:
    function = {"name": name, "arguments": arguments}
    open.calls.append({"id": _text(item, "call_id", place), "type": "function", "function": function})
    open.place.calls.append(place)


_OF_ASSISTANT: dict[str, Callable[[_Assistant, dict[str, Any], str], None]] = {
    "message": _assistant_message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
}


def _content(given: object, place: str) -> str | list[dict[str, Any]]:
    """Return content as one text, or as a chat's parts where it has images. Raises BadField."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise BadField(place, f"must be a text or a list of parts, not {type(given).__name__}")
    parts = [_part(part, f"{place}.{index}") for index, part in enumerate(given)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: object, place: str) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "input_image":
        if not isinstance(part.get("image_url"), str):
            raise BadField(f"{place}.image_url", "must be a text with the image's data: files are not kept here")
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": _text(part, "refusal", place)}
    return {"type": "text", "text": _part_text(part, _TEXTS, place, " or input_image")}


def _part_text(part: object, kinds: Sequence[str], place: str, others: str = "") -> str:
    """Return the text of a part of one of these types. Raises BadField."""
    if not isinstance(part, dict):
        raise BadField(place, f"must be an object, not {type(part).__name__}")
    if part.get("type") not in kinds:
        raise BadField(f"{place}.type", f"{_shown(part.get('type'))}: only {', '.join(kinds)}{others} are supported")
    return _text(part, "text", place)


def _text(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadField(f"{place}.{name}", f"must be a text, not {type(value).__name__}")
    return value


def _shown(value: object) -> str:
    return repr(value[:100]) if isinstance(value, str) else type(value).__name__
