"""The schedule and the results of one step: plain values that can be sent to every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..completion import ListedLogprobs, TopLogprobs
from ..grammars.jump import NO_JUMP, Jump


class StateSlots(NamedTuple):
    """The slots of one sequence in the state pool of a module with recurrent layers, for one step."""

    read: int  # its states before the step's rows; slot 0 holds zeros
    write: int  # gets its states after them


class Vote(NamedTuple):
    """How the places in earlier tokens that end like a sequence, and went on as proposed so far, went on."""

    length: int  # tokens of the ending that is equal there
    num_alike: int  # places that the proposed token followed
    num_places: int


# A class of proposals that are accepted about equally often; or the vote for each token, which is such a class too.
Confidence = int | tuple[Vote, ...]


class Draft(NamedTuple):
    """Tokens that are proposed behind the last known one of a sequence. The step draws the token after each of them.

    Those that equal the draws before them, up to the first that does not, are accepted: the sequence takes them, and
    the draw behind them.
    """

    token_ids: tuple[int, ...]
    allowed: tuple[bytes | None, ...] = ()  # after each: the tokens that a grammar allows; empty without a grammar
    states: tuple[int, ...] = ()  # with recurrent layers: the slots that get the states after each
    source: str = ""  # who proposed them, and with what votes; known to the controller only
    confidence: Confidence = 0


NO_DRAFT = Draft(())


class ScheduledSequence(NamedTuple):  # one a sequence and step: a tuple takes a fifth of a frozen dataclass's time
    """One sequence's share of a step: rows for known tokens `start .. start + num_tokens - 1`, its jump's included."""

    id: str
    incarnation: int  # number of its preemptions; results of another incarnation are dropped
    start: int
    num_tokens: int
    new_blocks: tuple[int, ...]  # appended to its block table
    token_ids: tuple[int, ...] | None  # all known tokens, if it holds no blocks yet; None if the ranks know them
    jump: Jump = NO_JUMP  # begins here: its tokens are known before the rows run, of which later steps may have some
    num_blocks_kept: int | None = None  # of its block table, before the new ones; None: all
    allowed: bytes | None = None  # the tokens that a grammar allows: one bit a token, lowest bit first; None: all
    states: StateSlots | None = None  # None: the module has no recurrent layers
    draft: Draft = NO_DRAFT  # its rows come after the known tokens'
    num_prompt_tokens: int | None = None  # beside `token_ids`: how many of them are the prompt; None: all

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft.token_ids)


@dataclass(frozen=True)
class ScheduleOutput:
    """The schedule of one step, or of several decode steps of the same rows.

    Managers apply it in this order: ignored, exhausted, preempted, scheduled.
    """

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()  # (id, why it can never run)
    exhausted: tuple[tuple[str, str], ...] = ()  # (id, why): lone sequences larger than the pool, ended with "length"
    num_steps: int = 1  # decode steps of one row a sequence that may run one after another; blocks are there for all
    stop_ids: frozenset[int] = frozenset()  # tokens after which none of these steps follows

    num_rows: int = field(init=False, compare=False, repr=False)  # drafts' rows included
    has_drafts: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        num_rows, has_drafts = 0, False
        for item in self.scheduled:
            num_rows += item.num_tokens
            if item.draft is not NO_DRAFT:
                num_rows += len(item.draft.token_ids)
                has_drafts = True
        object.__setattr__(self, "num_rows", num_rows)
        object.__setattr__(self, "has_drafts", has_drafts)

    @property
    def has_one_token_each(self) -> bool:
        """Whether each sequence has one known token, and rows of drafts behind it at most."""
        if not self.has_drafts:
            return self.num_rows == len(self.scheduled)  # none has no token
        return all(item.num_tokens == 1 for item in self.scheduled)


@dataclass(slots=True)
class ScheduleDraft:
    """The schedule of one step while it is being made."""

    budget: int  # rows that it may still add
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    exhausted: list[tuple[str, str]] = field(default_factory=list)

    def put(self, item: ScheduledSequence) -> None:
        """Add a sequence to the step. It may have more rows than the budget has left: those of one image."""
        self.scheduled.append(item)
        self.budget = max(self.budget - item.num_tokens, 0)

    def output(self, step: int) -> ScheduleOutput:
        return ScheduleOutput(
            step, tuple(self.scheduled), tuple(self.preempted), tuple(self.ignored), tuple(self.exhausted)
        )


class NewToken(NamedTuple):
    """One token that a step adds to a sequence, with its recorded values."""

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs
    listed_logprobs: ListedLogprobs
    is_jumped: bool  # inserted, not sampled
    is_forced: bool  # the grammar allowed no other token
    masked_prob: float | None  # its probability among the tokens that a grammar allowed
    kept_ids: tuple[int, ...] = ()  # the tokens that the filters kept, if asked for


class SequenceResult(NamedTuple):
    """The step's result for one scheduled sequence."""

    id: str
    incarnation: int
    num_tokens: int  # rows of known tokens that ran
    token_id: int | None = None  # sampled after its last known token; None while known tokens remain to run
    logprob: float | None = None
    top_logprobs: TopLogprobs = ()
    prompt_logprobs: tuple[float, ...] = ()  # of the requested prompt tokens
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    listed_logprobs: ListedLogprobs = ()  # of the tokens that the request names
    prompt_listed_logprobs: tuple[ListedLogprobs, ...] = ()
    masked_prob: float | None = None  # of the sampled token, among the tokens that a grammar allowed
    was_only_choice: bool = False  # the grammar allowed no other token
    jump_logprobs: tuple[float, ...] = ()  # of the next tokens of the sequence's jump
    jump_top_logprobs: tuple[TopLogprobs, ...] = ()
    jump_listed_logprobs: tuple[ListedLogprobs, ...] = ()
    accepted: tuple[NewToken, ...] = ()  # tokens of its draft that were drawn: they come before `token_id`
    kept_ids: tuple[int, ...] = ()  # the tokens that the filters kept, if asked for

    def jumped(self, token_ids: Sequence[int]) -> Iterator[NewToken]:
        """Yield the jump's tokens that the step scored. token_ids: the jump's, from the first one without a score."""
        for index, logprob in enumerate(self.jump_logprobs):
            top = self.jump_top_logprobs[index] if self.jump_top_logprobs else ()
            listed = self.jump_listed_logprobs[index] if self.jump_listed_logprobs else ()
            yield NewToken(token_ids[index], logprob, top, listed, True, True, 1.0, (token_ids[index],))

    def sampled(self) -> NewToken:
        """Return the sampled token of a result that has one."""
        assert self.token_id is not None and self.logprob is not None
        return NewToken(self.token_id, self.logprob, self.top_logprobs, self.listed_logprobs, False,
                        self.was_only_choice, self.masked_prob, self.kept_ids)  # fmt: skip
