"""What the scheduler decides for one step, and what the step gives back: plain values that every rank can be sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..completion import ListedLogprobs, TopLogprobs
from ..grammars.jump import NO_JUMP, Jump


class ScheduledSequence(NamedTuple):  # one a row and step: a tuple is made in a fifth of a frozen dataclass's time
    """One sequence's share of a step: rows for known tokens `start .. start + num_tokens - 1`, after its jump."""

    id: str
    incarnation: int  # how often it has been preempted; results of another incarnation are dropped
    start: int
    num_tokens: int
    new_blocks: tuple[int, ...]  # appended to its block table
    token_ids: tuple[int, ...] | None  # all known tokens, when it holds no blocks yet; None when the ranks know them
    jump: Jump = NO_JUMP  # comes before anything runs; the rows begin before its tokens, and end behind the last
    num_blocks_kept: int | None = None  # of its block table, before the new ones; None: all
    allowed: bytes | None = None  # what a grammar lets be sampled: one bit a token, the first in the lowest; None: all


@dataclass(frozen=True)
class ScheduleOutput:
    """One step. Managers take the three lists in this order: ignored, preempted, scheduled."""

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()  # (id, why it can never run)
    exhausted: tuple[tuple[str, str], ...] = ()  # (id, why): lone sequences that outgrew the pool, ended with "length"

    @cached_property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.scheduled])


@dataclass(slots=True)
class ScheduleDraft:
    """One step while it is being decided."""

    budget: int  # rows that it may still take
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    exhausted: list[tuple[str, str]] = field(default_factory=list)

    def put(self, item: ScheduledSequence) -> None:
        """One more sequence runs."""
        self.scheduled.append(item)
        self.budget -= item.num_tokens

    def output(self, step: int) -> ScheduleOutput:
        return ScheduleOutput(
            step, tuple(self.scheduled), tuple(self.preempted), tuple(self.ignored), tuple(self.exhausted)
        )


class NewToken(NamedTuple):
    """One token that a step adds to a sequence, with what is recorded of it."""

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs
    listed_logprobs: ListedLogprobs
    is_jumped: bool  # put there, not sampled
    is_forced: bool  # there was no choice
    masked_prob: float | None  # among what a grammar allowed


class SequenceResult(NamedTuple):
    """What one scheduled sequence got from the step."""

    id: str
    incarnation: int
    num_tokens: int  # rows that ran
    token_id: int | None = None  # sampled after its last known token; None while known tokens are left to run
    logprob: float | None = None
    top_logprobs: TopLogprobs = ()
    prompt_logprobs: tuple[float, ...] = ()  # of the prompt tokens that follow the rows asked for
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    listed_logprobs: ListedLogprobs = ()  # of the tokens that the request names
    prompt_listed_logprobs: tuple[ListedLogprobs, ...] = ()
    masked_prob: float | None = None  # of the sampled token, among those that a grammar allowed
    was_only_choice: bool = False  # the grammar allowed no other
    jump: Jump = NO_JUMP  # that went before; token_id comes after it
    jump_logprobs: tuple[float, ...] = ()  # of its tokens
    jump_top_logprobs: tuple[TopLogprobs, ...] = ()
    jump_listed_logprobs: tuple[ListedLogprobs, ...] = ()

    def tokens(self) -> Iterator[NewToken]:
        """What it adds to the sequence, which has been rolled back: the jump's tokens, then the sampled one."""
        for index, token_id in enumerate(self.jump.token_ids):
            top = self.jump_top_logprobs[index] if self.jump_top_logprobs else ()
            listed = self.jump_listed_logprobs[index] if self.jump_listed_logprobs else ()
            yield NewToken(token_id, self.jump_logprobs[index], top, listed, True, True, 1.0)
        if self.token_id is not None and self.logprob is not None:
            yield NewToken(self.token_id, self.logprob, self.top_logprobs, self.listed_logprobs, False,
                           self.was_only_choice, self.masked_prob)  # fmt: skip
