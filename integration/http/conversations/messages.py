"""Messages as sessions compare them. Clients send an answer back with small changes, and it is the same answer.

| part of an answer | changes that do not count |
|---|---|
| content | null, an empty text, or parts; blanks at its ends |
| thoughts | left out; blanks at their ends; either of their names |
| calls of tools | ids, places and types; arguments as an object or as any JSON text of the same values, or that text |
| | as the one argument `input`, as the Responses API has calls of custom tools |
| all other fields | any |

Messages that were never sampled stand in a prompt as a client wrote them: of those, only fields that are null or empty
do not count, and thoughts that are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

INPUT = "input"  # the argument of a custom tool, which is a text
_THOUGHTS = ("reasoning_content", "reasoning")  # names of an answer's thoughts, which clients may leave out
_EXACT = 2**53  # from here on a number of JavaScript's may not be the integer that was written


class Likeness(IntEnum):
    """The likeness of a client's message, and of a conversation, to that of a session."""

    OTHER = 0
    SAME = 1  # an answer that came back with changes
    NAMED = 2  # likewise, and its calls have their ids
    EXACT = 3


def encoded(message: Mapping[str, Any]) -> bytes:
    """Encode a message as it is kept."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")  # arguments of a call may have half of a pair, by an escape


def likeness(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, is_answer: bool) -> Likeness:
    """Compare a client's message with the session's. is_answer: the session's was sampled."""
    has_thoughts = any(theirs.get(name) for name in _THOUGHTS)
    if _text_of(_plain(ours, has_thoughts=has_thoughts)) == _text_of(_plain(theirs, has_thoughts=has_thoughts)):
        return Likeness.EXACT
    if not is_answer or theirs.get("role") != "assistant":
        return Likeness.OTHER
    if _as_answer(ours, has_thoughts=has_thoughts) != _as_answer(theirs, has_thoughts=has_thoughts):
        return Likeness.OTHER
    return Likeness.NAMED if (ids := _ids_of(ours)) and ids == _ids_of(theirs) else Likeness.SAME


def chained(start: bytes, messages: Iterable[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """Return a digest of a conversation after each of these messages, equal where they may be the same. start: the
    digest before the first one."""
    found = []
    for message in messages:
        if message.get("role") == "assistant":
            text = _as_answer(message, has_thoughts=False)
        else:
            text = _text_of(_plain(message, has_thoughts=False))
        start = hashlib.blake2b(start + text.encode(), digest_size=16).digest()
        found.append(start)
    return tuple(found)


def shape_of(tools: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> bytes:
    """Return a digest of all that shapes a template's text besides the messages: the tools that it shows, as they are
    written, and its settings by name. Empty where there are none."""
    if not tools and not settings:
        return b""
    text = json.dumps([list(tools), sorted(settings.items())])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _plain(message: Mapping[str, Any], *, has_thoughts: bool) -> dict[str, Any]:
    """Return a message without the fields that clients send as null or empty where they got none."""
    left_out = () if has_thoughts else _THOUGHTS
    return {name: value for name, value in message.items()
            if value is not None and value != "" and value != [] and name not in left_out}  # fmt: skip


def _text_of(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _as_answer(message: Mapping[str, Any], *, has_thoughts: bool) -> str:
    """Return a text that is equal for all forms of one answer."""
    content = message.get("content")
    calls = [_called(call) for call in message.get("tool_calls") or ()]
    thoughts = next((told for name in _THOUGHTS if (told := message.get(name))), "") if has_thoughts else ""
    return _text_of([_stripped(content), _stripped(thoughts), calls])


def _ids_of(message: Mapping[str, Any]) -> list[object]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _stripped(value: object) -> object:
    return value.strip() if isinstance(value, str) else value or ""


def _called(call: Mapping[str, Any]) -> object:
    """Return the name of a call that was read, and a text that is equal for all forms of its arguments, with each
    number in one form, and with U+FFFD for half of a surrogate pair, as some clients are told it."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    text = _told(_plainly(json.dumps(arguments)))
    while (inner := _from_input(arguments)) is not None:
        arguments, text = inner
    return [function.get("name"), text]


def _from_input(arguments: object) -> tuple[object, str] | None:
    """Return the object whose JSON is the one argument `INPUT`, and its text; None: there is none. Such arguments are
    the same as that object: of other arguments than `INPUT` a custom tool gets the JSON, and that comes back as
    `INPUT`."""
    given = arguments.get(INPUT) if isinstance(arguments, Mapping) and len(arguments) == 1 else None
    if not isinstance(given, str) or not given.lstrip().startswith("{"):
        return None
    try:
        found = _plainly(given)
        return found, _told(found)
    except (ValueError, RecursionError):  # no JSON, or deeper than any that was read
        return None


def _told(value: object) -> str:
    """Return a text that is equal for equal values, and has U+FFFD for half of a surrogate pair."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _plainly(text: str) -> object:
    return json.loads(text, parse_int=_number, parse_float=_number)


def _number(text: str) -> int | float:
    """Return a number as a client writes it that has only float64: 1.0 is 1 there."""
    if text.removeprefix("-").isdecimal() and abs(whole := int(text)) < _EXACT:
        return whole
    value = float(text)
    return int(value) if value.is_integer() else value
