"""Turns of conversations: what each added to the tokens and messages of the turn before it.

    turn 1   prompt, output                     kept 0
    turn 2            kept: all of turn 1       prompt, output
    turn 3   kept: a part of turn 2             prompt, output

A turn keeps its own tokens only, so a conversation takes memory in proportion to its tokens, however many its turns.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....rollout.completion import WeightSpan
from ....rollout.media.images import Images
from ..images.pictures import SentPicture

# Bytes of memory, about, of the objects that hold a turn, a message and a span; a test compares them with the truth.
TURN_BYTES = 700
MESSAGE_BYTES = 180
SPAN_BYTES = 200
TOKEN_BYTES = 4
IMAGE_TOKEN_BYTES = 64  # of a token of a prompt with images: its place among them, and its rotary positions

_THOUGHTS = ("reasoning_content", "reasoning")  # of an assistant's message, which clients may leave out


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """One answered request of a session."""

    rid: str
    parent: Turn | None = field(repr=False)
    num_kept: int  # tokens of the parent that its prompt begins with
    added: array[int] = field(repr=False)  # the tokens after those, with the output
    num_prompt: int  # tokens before the output
    matched: int | str | None  # the stop token or the stop string that ended the output
    spans: tuple[WeightSpan, ...]  # weight versions of the output; positions count from the output's first token
    extra_key: str = ""  # under which its KV is cached
    messages: tuple[bytes, ...] | None = None  # JSON of those that it added to the parent's; None: it had token ids
    digest: bytes = field(default=b"", repr=False)  # of all messages up to its answer
    pictures: tuple[SentPicture, ...] = ()  # that it added to the parent's, in the order of their tokens
    images: Images | None = field(default=None, repr=False)  # of its whole prompt, without their tensors

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the whole conversation."""
        return self.num_kept + len(self.added)

    @property
    def num_bytes(self) -> int:
        """The memory that the turn takes, without its parent, in bytes."""
        messages = sum(MESSAGE_BYTES + len(message) for message in self.messages or ())
        texts = len(self.rid) + len(self.extra_key) + sum(picture.num_bytes for picture in self.pictures)
        tokens = TOKEN_BYTES * len(self.added) + (0 if self.images is None else IMAGE_TOKEN_BYTES * self.num_prompt)
        return TURN_BYTES + texts + tokens + SPAN_BYTES * len(self.spans) + messages

    @property
    def path(self) -> list[Turn]:
        """The turns up to this one, the first one first."""
        found, turn = [], self
        while True:
            found.append(turn)
            if turn.parent is None:
                return found[::-1]
            turn = turn.parent


def tokens_of(turn: Turn | None, num: int | None = None) -> list[int]:
    """Return the first tokens of a conversation, as they were sent and sampled. num: how many; None: all."""
    if turn is None:
        return []
    limit = turn.num_tokens if num is None else num
    parts: list[Sequence[int]] = []
    for one in reversed(turn.path):
        if limit > one.num_kept:
            parts.append(one.added[: limit - one.num_kept])
            limit = one.num_kept
    return [token for part in reversed(parts) for token in part]


def pictures_of(turn: Turn | None) -> list[SentPicture]:
    """Return the pictures of a conversation, in the order of their tokens."""
    return [picture for each in (turn.path if turn else ()) for picture in each.pictures]


def messages_of(turn: Turn | None) -> list[dict[str, Any]]:
    """Return the messages of a conversation, as they were sent and answered. The turn has messages."""
    return [json.loads(one) for each in (turn.path if turn else ()) for one in each.messages or ()]


def spans_of(turn: Turn) -> list[dict[str, object]]:
    """List the runs of a conversation's tokens that were sampled, each with its turn and its weights' version."""
    limit, found = turn.num_tokens, []
    for one in reversed(turn.path):
        for span in reversed(one.spans):
            start, end = one.num_prompt + span.start, min(one.num_prompt + span.end, limit)
            if start < end:
                found.append({"rid": one.rid, "start": start, "end": end, "version": span.version,
                              "digest": span.digest})  # fmt: skip
        limit = min(limit, one.num_kept)
    return found[::-1]


def encoded(message: Mapping[str, Any]) -> bytes:
    """Encode a message as it is kept."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def plain_form(message: Mapping[str, Any], *, has_thoughts: bool = True) -> dict[str, Any]:
    """Return a message as it is compared: clients send fields that are null or empty where they got none."""
    left_out = () if has_thoughts else _THOUGHTS
    return {name: value for name, value in message.items()
            if value is not None and value != "" and value != [] and name not in left_out}  # fmt: skip


def is_same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether a client's message is the session's. It may leave out the thoughts of an answer."""
    has_thoughts = any(theirs.get(name) for name in _THOUGHTS)
    return plain_form(ours, has_thoughts=has_thoughts) == plain_form(theirs, has_thoughts=has_thoughts)


def chained(start: bytes, messages: Iterable[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """Return a digest of a conversation after each of these messages. start: the digest before the first, or empty."""
    found = []
    for message in messages:
        text = json.dumps(plain_form(message, has_thoughts=False), sort_keys=True).encode()
        start = hashlib.blake2b(start + text, digest_size=16).digest()
        found.append(start)
    return tuple(found)
