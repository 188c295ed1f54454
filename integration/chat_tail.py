"""The tokens that a chat template writes behind an answer, so that the answer's own tokens can stay before them.

    history, as sent and sampled                          | what the template writes after the last answer
    <|im_start|>user ... <|im_start|>assistant\\n answer    | <|im_end|>\\n<|im_start|>user ... <|im_start|>assistant\\n

A template is a program that writes a whole conversation, and it may write earlier answers otherwise than they were
sampled (it drops thoughts, trims blanks, sorts arguments). The text after the last answer is found by letting it write
the conversation with a mark in place of that answer, or in its last call of a tool: some templates write the results of
tools only where they see the calls. Marks in the new messages show that none of these is lost or stands elsewhere.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

_MOST_SHARED = 64  # tokens that end an answer, which the history may have already


@dataclass(frozen=True)
class Template:
    """A chat template with its tokenizer."""

    render: Callable[[Messages], str]  # to the text of a prompt; raises where the template refuses the messages
    tokenise: Callable[[str], list[int]]  # a text that has its special tokens; raises where it is too long
    special_ids: Collection[int]  # tokens that no text of a model should have
    encode: Callable[[str], list[int]] | None = None  # the same of a text without images; None: the same function
    close: Callable[[Messages], str] | None = None  # as `render`, of a conversation that ends with its last message


class UnclearEnd(Exception):
    """The error of a template that does not show where an answer ends."""


@dataclass(frozen=True)
class _Tail:
    """The text that a template writes behind a mark in the last answer."""

    before: Messages  # up to that answer, which has the mark
    mark: str
    text: str
    between: str  # its beginning, up to the text of the first new message
    is_in_call: bool  # the mark is in a call, so that the text begins with the end of this call


def added_tokens(
    history: list[int], matched: int | str | None, known: Messages, new: Messages, template: Template,
    *, refused: type[Exception],
) -> list[int]:  # fmt: skip
    """Return the tokens of the text that the template writes after the last answer.

    history: tokens of the conversation, up to the end of that answer. matched: the stop token or the stop string that
    ended it. known: the messages of the history, the answer's the last. new: those behind it. refused: the error by
    which `template.render` refuses messages. Raises UnclearEnd, also where a new message would be lost, and the errors
    of the template.
    """
    mark = f"answer{secrets.token_hex(12)}"
    answer, refusal = known[-1], ""
    ways: Messages = [{"role": "assistant", "content": mark}]
    if calls := answer.get("tool_calls"):
        # Without its content, which some templates write behind the results of its calls.
        ways.insert(0, {**answer, "content": "", "tool_calls": _marked(calls, mark)})
    for told in ways:
        try:
            tail = _tail([*known[:-1], told], new, mark, template, is_in_call="tool_calls" in told)
        except refused as error:
            refusal = f" ({error})"
            continue
        found = None if tail is None else _behind(history, matched, tail, template, refused)
        if found is not None:
            return found
    raise UnclearEnd(f"the chat template does not show where an answer ends{refusal}")


def _tail(before: Messages, new: Messages, mark: str, template: Template, *, is_in_call: bool) -> _Tail | None:
    """Return the text behind the mark; None: there is none, or it has not all of the new messages."""
    marks = [f"message{secrets.token_hex(12)}" for _ in new]
    shown = template.render([*before, *map(_with_mark, new, marks)])
    _, _, behind = shown.partition(mark)
    wanted = [one for one, message in zip(marks, new, strict=True) if _with_mark(message, one) is not message]
    places = [behind.find(one) for one in wanted]
    text = template.render([*before, *new])
    if shown.count(mark) != 1 or text.count(mark) != 1 or min(places, default=0) < 0:
        return None
    return _Tail(before, mark, text.partition(mark)[2], behind[: min(places, default=None)], is_in_call)


def _with_mark(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a new message with a mark before its text; the same one where it is an answer, of which templates leave
    parts out, or has no text."""
    content = message.get("content")
    if message.get("role") == "assistant":
        return message
    if isinstance(content, str):
        return {**message, "content": mark + content}
    return {**message, "content": [{"type": "text", "text": mark}, *content]} if isinstance(content, list) else message


def _marked(calls: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return an answer's calls of tools, with a mark as the last one's arguments."""
    function = calls[-1].get("function") or {}
    is_text = isinstance(function.get("arguments"), str)
    arguments = json.dumps({"mark": mark}) if is_text else {"mark": mark}
    return [*calls[:-1], {**calls[-1], "function": {**function, "arguments": arguments}}]


def _behind(
    history: list[int], matched: int | str | None, tail: _Tail, template: Template, refused: type[Exception]
) -> list[int] | None:
    """Return the tokens of the text without those of the answer's end that the history has; None: that is unclear."""
    encode = template.encode or template.tokenise
    text = tail.text
    if isinstance(matched, str) and matched and not tail.is_in_call:
        text = text.removeprefix(matched)  # the answer's tokens have it
    num_between = len(encode(tail.between)) if tail.between else 0
    rest, last = template.tokenise(text), history[-1]
    between = rest[:num_between]
    first = next((at for at, token in enumerate(between) if token in template.special_ids), None)
    starts = range(len(between) if tail.is_in_call else min(first or 0, len(between) - 1) + 1)
    if last == matched or last in template.special_ids:  # the answer ends with the token that closes it
        if (end := _end_of_shared(history, between, starts)) is not None:
            return rest[end:]
        if first is not None and _closes(last, tail, template, refused):
            return rest[first + 1 :]
    before_stop = history[:-1] if last == matched else history  # the template may not write this stop token at all
    end = _end_of_shared(before_stop, between, starts)
    if end is not None and before_stop[-1] in template.special_ids:
        return rest[end:]
    if not tail.is_in_call:
        return rest
    if first is not None:
        return rest[first:]  # the text before it belongs to the call
    return None if end is None else rest[end:]


def _end_of_shared(history: Sequence[int], between: Sequence[int], starts: Sequence[int]) -> int | None:
    """Return the place behind the most tokens that begin at one of these places and are the history's last ones; None:
    there are none."""
    best, found = 0, None
    for start in starts:
        for num in range(min(len(between) - start, len(history), _MOST_SHARED), best, -1):
            if list(history[-num:]) == list(between[start : start + num]):
                best, found = num, start + num
                break
    return found


def _closes(token: int, tail: _Tail, template: Template, refused: type[Exception]) -> bool:
    """Return whether the template closes a conversation's last answer with this token, and others otherwise."""
    if template.close is None:
        return False
    try:
        text = template.close(tail.before)
    except refused:
        return False
    encode = template.encode or template.tokenise
    behind = encode(text.partition(tail.mark)[2])
    return next((one for one in behind if one in template.special_ids), None) == token
