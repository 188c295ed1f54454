"""Turns of conversations: what each added to the tokens and messages of the turn before it.

    turn 1   prompt, output                     kept 0
    turn 2            kept: all of turn 1       prompt, output
    turn 3   kept: a part of turn 2             prompt, output

A turn keeps its own tokens only, so a conversation takes memory in proportion to its tokens, however many its turns.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ....rollout.completion import WeightSpan
from ....rollout.media.images import Images
from ..images.pictures import SentPicture

# Bytes of memory, about, of the objects that hold a turn, a message and a span; a test compares them with the truth.
TURN_BYTES = 800
MESSAGE_BYTES = 180
SPAN_BYTES = 200
TOKEN_BYTES = 4
LOGPROB_BYTES = 4  # of a token that was sampled
IMAGE_TOKEN_BYTES = 64  # of a token of a prompt with images: its place among them, and its rotary positions


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
    logprobs: array[float] = field(default_factory=lambda: array("f"), repr=False)  # of the output's tokens
    finish: str | None = None  # the type of its finish reason
    temperature: float | None = None  # that its output was sampled at, and its log-probabilities are of
    forced: bytes | None = None  # of each of the output's tokens, whether a grammar left no choice; None: no grammar

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
        tokens += LOGPROB_BYTES * len(self.logprobs) + len(self.forced or b"")
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


def longest_beginning(turns: Sequence[Turn], token_ids: Sequence[int]) -> Turn | None:
    """Return the turn with the most tokens with all of which a prompt begins, of several the last; None: there is none.
    turns: each after its parent."""
    prompt, best = array("i", token_ids), None
    shared: dict[int, int] = {}  # by turn: first tokens that it has in common with the prompt
    for turn in turns:
        before = turn.num_kept if turn.parent is None else shared.get(id(turn.parent), 0)
        if before < turn.num_kept:
            shared[id(turn)] = before
            continue
        own = prompt[turn.num_kept : turn.num_tokens]
        num = len(own) if own == turn.added else _num_equal(own, turn.added)
        shared[id(turn)] = turn.num_kept + num
        if num == len(turn.added) and (best is None or turn.num_tokens >= best.num_tokens):
            best = turn
    return best


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def answer_start(turn: Turn) -> int:
    """Return the first token of a turn's answer, of which earlier turns may have the beginning."""
    while turn.parent is not None and turn.num_prompt == turn.num_kept == turn.parent.num_tokens:
        turn = turn.parent
    return turn.num_prompt


def pictures_of(turn: Turn | None) -> list[SentPicture]:
    """Return the pictures of a conversation, in the order of their tokens."""
    return [picture for each in (turn.path if turn else ()) for picture in each.pictures]


def messages_of(turn: Turn | None) -> list[dict[str, Any]]:
    """Return the messages of a conversation, as they were sent and answered. The turn has messages."""
    return [json.loads(one) for each in (turn.path if turn else ()) for one in each.messages or ()]


def spans_of(turn: Turn, *, has_logprobs: bool = False) -> list[dict[str, object]]:
    """List the runs of a conversation's tokens that were sampled, each with its turn and its weights' version.
    has_logprobs: also with the log-probabilities, null where they are not finite, and with `forced` where there was a
    grammar."""
    limit, found = turn.num_tokens, []
    for one in reversed(turn.path):
        for span in reversed(one.spans):
            start, end = one.num_prompt + span.start, min(one.num_prompt + span.end, limit)
            if start >= end:
                continue
            run: dict[str, object] = {
                "rid": one.rid, "start": start, "end": end, "version": span.version, "digest": span.digest,
                "temperature": one.temperature, "finish_reason": one.finish,
            }  # fmt: skip
            if has_logprobs:
                kept = one.logprobs[start - one.num_prompt : end - one.num_prompt]
                run["logprobs"] = [logprob if math.isfinite(logprob) else None for logprob in kept]
                if one.forced is not None:
                    run["forced"] = [bool(each) for each in one.forced[start - one.num_prompt : end - one.num_prompt]]
            found.append(run)
        limit = min(limit, one.num_kept)
    return found[::-1]
