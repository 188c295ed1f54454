"""The prompt of a chat's next turn: the tokens of its history as they stand, and those of what its template adds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...chat_tail import Messages, Template, UnclearEnd, added_tokens
from ..edge.errors import BadField
from ..edge.session_paths import FIELD
from .messages import Likeness, chained, likeness
from .params import History, SessionParams
from .turns import Turn, messages_of, tokens_of

Find = Callable[[tuple[bytes, ...]], Iterable[Sequence[Turn]]]
_WHOLE = ("system", "developer", "assistant")  # authors that new messages do not have


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat's next turn."""

    token_ids: list[int]
    num_history: int  # first tokens that are the history's
    differs_at: int | None  # the first token of which the template's own prompt has another; None: it is the same


def divide(
    base: Turn | None,
    given: Messages,
    params: SessionParams,
    find: Find,
    shape: bytes = b"",
    *,
    continues: bool = False,
) -> tuple[Turn | None, Messages]:
    """Return the turn that a chat goes on from, and its new messages, of which there may be none behind an answer. A
    branch with another shape than the turn's begins a conversation, with the messages of the turn before the new ones.
    find: returns the turns that may begin with the messages of these digests, see `Session.with_messages`. shape: see
    `shape_of`. continues: the last message goes on. Raises BadField."""
    if not given:
        raise BadField("messages", "must not be empty")
    is_whole = _is_whole(base, given, params)
    if is_whole and params.branch:
        base = _last_equal(given, find, shape)
        return base, given[_num_messages(base) :]
    _check_messages(base)
    if not is_whole:
        if base is not None and params.branch and not _has_shape(base, shape):
            return None, [*messages_of(base), *given]
        return base, given
    compared = _Compared(given)
    if base is not None and not compared.score(base) and compared.differs_at < len(given):
        raise BadField(
            f"messages.{compared.differs_at}", "differs from the session's message: send it as it was answered, or "
            f"with {FIELD}.branch go on from the last turn that has the messages before it"
        )  # fmt: skip
    if len(given) < (num_known := _num_messages(base)) + (not continues):
        raise BadField(
            "messages", f"the session has {num_known} messages already, and these {len(given)} add none: send more, "
            f"or with {FIELD}.branch go on from an earlier turn"
        )  # fmt: skip
    return base, given[num_known:]


def check_cut(base: Turn | None, new: Messages) -> None:
    """Check that the last message of a conversation is a turn's answer that did not end by itself, so that it can go
    on. new: the messages behind the turn's. Raises BadField."""
    if base is None or new:
        raise BadField("continue_final_message", "goes on with an answer of the session only: the last message is none")
    if base.matched is not None:
        raise BadField("continue_final_message", f"the answer of the turn {base.rid!r} has ended by itself")


def chat_prompt(
    base: Turn | None, new: Messages, policy: History, template: Template, *, continues: bool = False
) -> ChatPrompt:
    """Return the prompt that goes on from a turn with new messages, or where it continues with the tokens of its answer
    themselves. Slow for long conversations. Raises BadField."""
    known, history = messages_of(base), tokens_of(base)
    if base is None or policy == "template":
        theirs = template.tokenise(template.render([*known, *new]))
        return ChatPrompt(theirs, num_equal(history, theirs), None)
    if continues:
        return ChatPrompt(history, len(history), _differs_at(history, base, known, template))
    try:
        token_ids = history + added_tokens(history, base.matched, known, new, template, refused=BadField)
    except UnclearEnd as error:
        template.render([*known, *new])  # its own error is the plainer one
        raise BadField(
            "messages", f'{error}: open the session with the history "template", or send token ids'
        ) from error  # fmt: skip
    return ChatPrompt(token_ids, len(history), _differs_at(token_ids, base, [*known, *new], template))


def _differs_at(ours: list[int], base: Turn, messages: Messages, template: Template) -> int | None:
    """Return the first token of which the template's own prompt has another; the answer's first one where it refuses
    these messages, as an answer that it would not begin."""
    try:
        theirs = template.tokenise(template.render(messages))
    except BadField:
        return base.num_prompt
    num_same = num_equal(ours, theirs)
    return None if num_same == len(ours) == len(theirs) else num_same


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


def _has_shape(turn: Turn, shape: bytes) -> bool:
    """Return whether the conversation of a turn began with this shape."""
    first = turn.path[0]
    return chained(shape, map(json.loads, first.messages or ()))[-1] == first.digest


def _num_messages(turn: Turn | None) -> int:
    return sum(len(one.messages or ()) for one in (turn.path if turn else ()))


def _last_equal(given: Messages, find: Find, shape: bytes) -> Turn | None:
    """Return the turn with the most messages that the given ones begin with, of several the one that they are like the
    most, and of those the newest; None: there is none. The same request once more goes on from the same turn."""
    compared = _Compared(given)
    for turns in find(chained(shape, given)):
        best, found = 0, None
        for turn in turns:
            if (its := compared.score(turn)) > best:
                best, found = its, turn
            if best == Likeness.EXACT * len(turn.path):
                break
        if found is not None:
            return found
    return None


class _Compared:
    """The messages of a client, compared with those of turns."""

    def __init__(self, given: Messages) -> None:
        self._given = given
        self._known: dict[str, tuple[int, int]] = {}  # by rid: score of the conversation up to a turn, and its length
        self.differs_at = 0  # the first message that differed, in the last comparison that found one

    def score(self, turn: Turn) -> int:
        """Return how much the first messages are like a turn's whole conversation: the sum of the likenesses of its
        turns; 0: they are others."""
        score = num = 0
        for one in turn.path:
            if one.rid not in self._known:
                its, num = self._of_one(one, num)
                self._known[one.rid] = (score + its if its else 0), num
            score, num = self._known[one.rid]
            if not score:
                break
        return score

    def _of_one(self, turn: Turn, start: int) -> tuple[Likeness, int]:
        """Compare the messages of one turn, of which the last is the answer. start: its first message."""
        found, num = Likeness.EXACT, len(turn.messages or ())
        for index, text in enumerate(turn.messages or (), start):
            if index >= len(self._given):
                self.differs_at = index
                return Likeness.OTHER, index
            its = likeness(json.loads(text), self._given[index], is_answer=index == start + num - 1)
            if its is Likeness.OTHER:
                self.differs_at = index
                return its, index
            found = min(found, its)
        return found, start + num
