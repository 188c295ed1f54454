"""The prompt of a chat's next turn: the tokens of its history as they stand, and those of what its template adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...chat_tail import Messages, Template, UnclearEnd, added_tokens
from ..edge.errors import BadField
from .params import FIELD, History, SessionParams
from .turns import Turn, chained, is_same, messages_of, tokens_of

_WHOLE = ("system", "developer", "assistant")  # authors that new messages do not have


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
    try:
        token_ids = history + added_tokens(history, base.matched, known, new, template, refused=BadField)
    except UnclearEnd as error:
        raise BadField(
            "messages", f'{error}: open the session with the history "template", or send token ids'
        ) from error  # fmt: skip
    num_same = num_equal(token_ids, theirs)
    is_same_prompt = num_same == len(token_ids) == len(theirs)
    return ChatPrompt(token_ids, len(history), None if is_same_prompt else num_same)


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first tokens that two lists share."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


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
