"""Messages of OpenAI's API, made of answers: whole and in pieces."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from .calls import Call
from .formats import CALL, CONTENT, MISTRAL_ID_CHARS, REASONING
from .parser import AnswerForm, AnswerParser, Beginning, Part

_FIELDS = {CONTENT: "content", REASONING: "reasoning_content"}
_CHARS_PER_COST = 64
Fields = dict[str, Any]


class AnswerStream:
    """The message of one answer, whose text grows."""

    def __init__(self, form: AnswerForm, beginning: Beginning, *, keeps_message: bool = False) -> None:
        """Begin an answer. keeps_message: `message` will be asked for."""
        self._keeps_message = keeps_message
        self._parser = AnswerParser(form, beginning.prefix, beginning.begun)
        self._num_id_chars = form.num_id_chars
        self._parts: list[Part] = []
        self._calls: list[Fields] = []

    @property
    def has_calls(self) -> bool:
        """Whether the answer has called a tool."""
        return bool(self._calls)

    @property
    def message(self) -> Fields:
        """The message that all deltas so far make together, where it is kept."""
        assert self._keeps_message
        return _joined(self._parts, self._calls)

    def cost(self, text: str, *, is_last: bool) -> int:
        """Return what a further text will cost, see `Encoder.run`: where a call may end, that of the whole call."""
        ends_call = is_last or ">" in text or "]" in text
        return (len(text) + self._parser.num_held * ends_call) // _CHARS_PER_COST

    def deltas(self, text: str, *, is_last: bool) -> list[Fields]:
        """Add text and return the pieces of the message that are certain now, in the order of the answer."""
        parts = self._parser.feed(text) + (self._parser.finish() if is_last else [])
        if self._keeps_message:
            self._parts += parts
        return [delta for part in parts for delta in self._deltas(part)]

    def _deltas(self, part: Part) -> list[Fields]:
        if part.kind != CALL:
            return [{_FIELDS[part.kind]: part.text}]
        assert part.call is not None
        index, call = len(self._calls), _call(part.call, self._num_id_chars)
        self._calls.append(call)
        first = {"index": index, **call, "function": {**call["function"], "arguments": ""}}
        arguments = call["function"]["arguments"]
        return [{"tool_calls": [first]}, {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}]


def message_of(form: AnswerForm, beginning: Beginning, text: str) -> Fields:
    """Return the message of a whole answer."""
    parser = AnswerParser(form, beginning.prefix, beginning.begun)
    parts = [*parser.feed(text), *parser.finish()]
    return _joined(parts, [_call(part.call, form.num_id_chars) for part in parts if part.call is not None])


def _joined(parts: Sequence[Part], calls: list[Fields]) -> Fields:
    texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in _FIELDS}
    message: Fields = {"role": "assistant", "content": texts[CONTENT] or (None if parts else "")}
    if texts[REASONING]:
        message["reasoning_content"] = texts[REASONING]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: Call, num_id_chars: int) -> Fields:
    id = uuid.uuid4().hex[:num_id_chars]
    id = id if num_id_chars == MISTRAL_ID_CHARS else f"call_{id}"
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
