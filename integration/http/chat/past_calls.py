"""Past answers that call tools, where a chat template writes them otherwise than they were sent.

| the template | then |
|---|---|
| writes calls only where the content is none | empty content is none |
| refuses thoughts beside content and calls | the content is the end of the thoughts |
| writes calls only without content | the content is an answer of its own before that with the calls |
| writes one call of an answer alone | each call is an answer of its own, with its results behind it |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

from .rendering import Message, Render, Rendering, writes
from .roles import BREAK

_ASK: Message = {"role": "user", "content": "ask"}
_TEXT, _THOUGHTS = "as content", "as thoughts"
_VALUES = ("as value one", "as value two")  # of the arguments of two calls
_THOUGHT_OF = "reasoning_content"


@dataclass(frozen=True)
class PastCalls:
    """The answers with calls that a chat template writes, each kind of which is asked for only where it matters."""

    render: Render  # for questions

    def fitted(self, messages: list[Message]) -> list[Message]:
        """Return the messages that the template writes."""
        found: list[Message] = []
        at = 0
        while at < len(messages):
            message, at = messages[at], at + 1
            if not message.get("tool_calls"):
                found.append(message)
                continue
            results = list(takewhile(lambda one: one["role"] == "tool", messages[at:]))
            found += self._answers(message, results)
            at += len(results)
        return found

    @property
    def is_single(self) -> bool:
        """Whether the template writes one call of an answer, but not two."""
        return self._writes(_answer(self._empty, 1), 1) and not self._writes(_answer(self._empty, 2), 2)

    def _answers(self, message: Message, results: list[Message]) -> list[Message]:
        """Return the answers that one with calls becomes, and the results of these."""
        before: list[Message] = []
        content, thoughts = message.get("content"), message.get(_THOUGHT_OF)
        if content and thoughts and self._folds:
            message = {**message, "content": "", _THOUGHT_OF: f"{thoughts}{BREAK}{content}"}
        elif content and self._divides:
            before = [{name: value for name, value in message.items() if name != "tool_calls"}]
            message = {name: value for name, value in message.items() if name != _THOUGHT_OF} | {"content": ""}
        if not message.get("content"):
            message = {**message, "content": self._empty}
        if len(message["tool_calls"]) == 1 or not self._is_one_by_one:
            return [*before, message, *results]
        return [*before, *_one_by_one(message, results, self._empty)]

    @cached_property
    def _empty(self) -> str | None:
        """The content of an answer with calls alone."""
        return "" if self._writes(_answer("", 1), 1) or not self._writes(_answer(None, 1), 1) else None

    @cached_property
    def _folds(self) -> bool:
        """Whether an answer's content must be a part of its thoughts."""
        beside, folded = {_THOUGHT_OF: _THOUGHTS}, {_THOUGHT_OF: f"{_THOUGHTS}{BREAK}{_TEXT}"}
        return not self._writes(_answer(_TEXT, 1, **beside), 1) and self._writes(_answer("", 1, **folded), 1)

    @cached_property
    def _divides(self) -> bool:
        """Whether an answer's content must stand before its calls, as an answer of its own."""
        if self._writes(_answer(_TEXT, 1), 1):
            return False
        told = [{"role": "assistant", "content": _TEXT}, _answer(self._empty, 1)]
        return writes(self.render, [_ASK, *told, *_results(1)], [_TEXT, _VALUES[0]])

    @cached_property
    def _is_one_by_one(self) -> bool:
        """Whether an answer must have one call."""
        told = _one_by_one(_answer(self._empty, 2), _results(2), self._empty)
        return self.is_single and writes(self.render, [_ASK, *told], _VALUES)

    def _writes(self, answer: Message, num: int) -> bool:
        """Return whether the template writes all calls of an answer."""
        return writes(self.render, [_ASK, answer, *_results(num)], _VALUES[:num])


@lru_cache(maxsize=8)
def writes_one_call_alone(tokenizer: Any, template: str) -> bool:
    """Return whether a tokenizer's chat template, whose text this is, writes one call of an answer, but not two."""
    if not template:
        return False
    return PastCalls(Rendering(tokenizer, {"tokenize": False, "tools": [{}]}).asking).is_single


def _one_by_one(message: Message, results: Sequence[Message], empty: str | None) -> list[Message]:
    """Return an answer for each call, and behind it the results that have its id, or else its place."""
    calls = message["tool_calls"]
    numbers = {call.get("id"): number for number, call in enumerate(calls)}
    places = [numbers.get(result.get("tool_call_id"), min(at, len(calls) - 1)) for at, result in enumerate(results)]
    others = {"role": "assistant", "content": empty}
    found: list[Message] = []
    for number, call in enumerate(calls):
        found.append({**(others if number else message), "tool_calls": [call]})
        found += [result for place, result in zip(places, results, strict=True) if place == number]
    return found


def _answer(content: str | None, num: int, **others: object) -> Message:
    """Return an answer with this number of calls, for a question."""
    calls = [
        {"id": _id(at), "type": "function", "function": {"name": "probe", "arguments": {"value": value}}}
        for at, value in enumerate(_VALUES[:num])
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **others}


def _results(num: int) -> list[Message]:
    return [{"role": "tool", "name": "probe", "tool_call_id": _id(at), "content": "result"} for at in range(num)]


def _id(number: int) -> str:
    return f"call{number:05}"  # nine characters, as Mistral's templates want them
