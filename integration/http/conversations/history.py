"""The prompt of a chat's next turn: the tokens of its history as they stand, and those of what its template adds.

    history, as sent and sampled                          | what the template writes after the last answer
    <|im_start|>user ... <|im_start|>assistant\\n answer    | <|im_end|>\\n<|im_start|>user ... <|im_start|>assistant\\n

A template is a program that writes a whole conversation, and it may write earlier answers otherwise than they were
sampled (it drops thoughts, trims blanks, sorts arguments). The text after the last answer is found by letting it write
the conversation with a mark in place of that answer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..edge.errors import BadField
from .params import FIELD, History, SessionParams
from .turns import Turn, chained, is_same, messages_of, tokens_of

Messages = list[dict[str, Any]]

_MOST_SHARED = 16  # tokens that end the calls of tools, and their turn
_WHOLE = ("system", "developer", "assistant")  # authors that new messages do not have


@dataclass(frozen=True)
class Template:
    """A chat template with its tokenizer."""

    render: Callable[[Messages], str]  # to the text of a prompt; raises BadField
    tokenise: Callable[[str], list[int]]  # a text that has its special tokens; raises BadField where it is too long
    special_ids: Collection[int]  # tokens that no text of a model should have


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat's next turn."""

    token_ids: list[int]
    num_history: int  # first tokens that are the history's
    differs_at: int | None  # the first token of which the template's own prompt has another; None: it is the same


def divide(
    base: Turn | None, given: Messages, params: SessionParams, find: Callable[[tuple[bytes, ...]], Turn | None]
) -> tuple[Turn | None, Messages]:
    """Return the turn that a chat goes on from, and its new messages. find: returns the turn that has the most of the
    messages with these digests, see `chained`. Raises BadField."""
    if not given:
        raise BadField("messages", "must not be empty")
    if not _is_whole(base, given, params):
        _check_messages(base)
        return base, given
    if params.branch:
        base = _last_equal(given, find)
    _check_messages(base)
    known = messages_of(base)
    for index, (ours, theirs) in enumerate(zip(known, given, strict=False)):
        if not is_same(ours, theirs):
            raise BadField(
                f"messages.{index}", "differs from the session's message: send it as it was answered, or with "
                f"{FIELD}.branch go on from the last turn that has the messages before it"
            )  # fmt: skip
    if len(given) <= len(known):
        raise BadField(
            "messages", f"the session has {len(known)} messages already, and these {len(given)} add none: send more, "
            f"or with {FIELD}.branch go on from an earlier turn"
        )  # fmt: skip
    return base, given[len(known) :]


def chat_prompt(base: Turn | None, new: Messages, policy: History, template: Template) -> ChatPrompt:
    """Return the prompt that goes on from a turn with new messages. Slow for long conversations. Raises BadField."""
    known = messages_of(base)
    theirs = template.tokenise(template.render([*known, *new]))
    if base is None:
        return ChatPrompt(theirs, 0, None)
    history = tokens_of(base)
    if policy == "template":
        return ChatPrompt(theirs, num_equal(history, theirs), None)
    token_ids = history + _added(base, history, known, new, template)
    num_same = num_equal(token_ids, theirs)
    is_same_prompt = num_same == len(token_ids) == len(theirs)
    return ChatPrompt(token_ids, len(history), None if is_same_prompt else num_same)


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first tokens that two lists share."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _added(base: Turn, history: list[int], known: Messages, new: Messages, template: Template) -> list[int]:
    """Return the tokens of the text that the template writes after the last answer. Raises BadField."""
    mark = f"answer{secrets.token_hex(12)}"
    answer, refusal = known[-1], ""
    try:
        text = template.render([*known[:-1], {"role": "assistant", "content": mark}, *new])
    except BadField as error:  # it may want an answer that calls tools before what these say
        text, refusal = "", f": {error.message}"
    if text.count(mark) == 1:
        text = text.partition(mark)[2]
        if isinstance(base.matched, str) and base.matched:
            text = text.removeprefix(base.matched)  # the answer's tokens have it
        added, last = template.tokenise(text), history[-1]
        if added and added[0] == last and (last == base.matched or last in template.special_ids):
            return added[1:]  # the answer ends with the token that closes it
        return added
    calls = answer.get("tool_calls")
    text = template.render([*known[:-1], {**answer, "tool_calls": _marked(calls, mark)}, *new]) if calls else ""
    if text.count(mark) == 1:
        return _after_calls(history, template.tokenise(text.partition(mark)[2]), template)
    raise BadField(
        "messages", "the chat template does not show where an answer ends: open the session with the history "
        f'"template", or send token ids{refusal}'
    )  # fmt: skip


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


def _is_whole(base: Turn | None, given: Messages, params: SessionParams) -> bool:
    if params.messages is not None:
        return params.messages == "all"
    return base is None or any(message.get("role") in _WHOLE for message in given)


def _check_messages(base: Turn | None) -> None:
    if base is not None and base.messages is None:
        raise BadField(
            "messages", f"the turn {base.rid!r} was made of token ids, which have no messages: send token ids again"
        )


def _last_equal(given: Messages, find: Callable[[tuple[bytes, ...]], Turn | None]) -> Turn | None:
    """Return the turn with the most messages that the given ones begin with, and go beyond; None: there is none."""
    found = find(chained(b"", given)[:-1])
    while found is not None:
        known = messages_of(found)
        if all(map(is_same, known, given)):
            return found
        found = found.parent  # its thoughts differ
    return None
