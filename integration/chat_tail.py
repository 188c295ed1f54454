"""The tokens that a chat template writes behind an answer, so that the answer's own tokens can stay before them.

    history, as sent and sampled                          | what the template writes after the last answer
    <|im_start|>user ... <|im_start|>assistant\\n answer    | <|im_end|>\\n<|im_start|>user ... <|im_start|>assistant\\n

A template is a program that writes a whole conversation, and it may write earlier answers otherwise than they were
sampled (it drops thoughts, trims blanks, sorts arguments). The text after the last answer is found by letting it write
the conversation with a mark in place of that answer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

_MOST_SHARED = 16  # tokens that end the calls of tools, and their turn


@dataclass(frozen=True)
class Template:
    """A chat template with its tokenizer."""

    render: Callable[[Messages], str]  # to the text of a prompt; raises where the template refuses the messages
    tokenise: Callable[[str], list[int]]  # a text that has its special tokens; raises where it is too long
    special_ids: Collection[int]  # tokens that no text of a model should have


class UnclearEnd(Exception):
    """The error of a template that does not show where an answer ends."""


def added_tokens(
    history: list[int], matched: int | str | None, known: Messages, new: Messages, template: Template,
    *, refused: type[Exception],
) -> list[int]:  # fmt: skip
    """Return the tokens of the text that the template writes after the last answer.

    history: tokens of the conversation, up to the end of that answer. matched: the stop token or the stop string that
    ended it. known: the messages of the history, the answer's the last. new: those behind it. refused: the error by
    which `template.render` refuses messages. Raises UnclearEnd, and the errors of the template.
    """
    mark = f"answer{secrets.token_hex(12)}"
    answer, refusal = known[-1], ""
    try:
        text = template.render([*known[:-1], {"role": "assistant", "content": mark}, *new])
    except refused as error:  # it may want an answer that calls tools before what these say
        text, refusal = "", f" ({error})"
    if text.count(mark) == 1:
        text = text.partition(mark)[2]
        if isinstance(matched, str) and matched:
            text = text.removeprefix(matched)  # the answer's tokens have it
        added, last = template.tokenise(text), history[-1]
        if added and added[0] == last and (last == matched or last in template.special_ids):
            return added[1:]  # the answer ends with the token that closes it
        return added
    calls = answer.get("tool_calls")
    text = template.render([*known[:-1], {**answer, "tool_calls": _marked(calls, mark)}, *new]) if calls else ""
    if text.count(mark) == 1:
        return _after_calls(history, template.tokenise(text.partition(mark)[2]), template)
    raise UnclearEnd(f"the chat template does not show where an answer ends{refusal}")


def _marked(calls: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return an answer's calls of tools, with a mark as the last one's arguments."""
    function = calls[-1].get("function") or {}
    is_text = isinstance(function.get("arguments"), str)
    arguments = json.dumps({"mark": mark}) if is_text else {"mark": mark}
    return [*calls[:-1], {**calls[-1], "function": {**function, "arguments": arguments}}]


def _after_calls(history: list[int], rest: list[int], template: Template) -> list[int]:
    """Return what of these tokens the history does not have. rest: from within the last call on; what it has before
    its first special token belongs to that call."""
    start = next((at for at, token in enumerate(rest) if token in template.special_ids), len(rest))
    rest = rest[start:]
    for num in range(min(len(rest), len(history), _MOST_SHARED), 0, -1):
        if history[-num:] == rest[:num]:
            return rest[num:]
    return rest
