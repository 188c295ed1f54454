"""What the scheduler decides for one step, and what the step gives back: plain values that every rank can be sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from .completion import ListedLogprobs, TopLogprobs


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: rows for known tokens `start .. start + num_tokens - 1`."""

    id: str
    incarnation: int  # how often it has been preempted; results of another incarnation are dropped
    start: int
    num_tokens: int
    new_blocks: tuple[int, ...]  # appended to its block table
    token_ids: tuple[int, ...] | None  # all known tokens, when it holds no blocks yet; None when the ranks know them


@dataclass(frozen=True, slots=True)
class ScheduleOutput:
    """One step. Managers take the three lists in this order: ignored, preempted, scheduled."""

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()  # (id, why it can never run)
    exhausted: tuple[tuple[str, str], ...] = ()  # (id, why): lone sequences that outgrew the pool, ended with "length"

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


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


@dataclass(frozen=True, slots=True)
class SequenceResult:
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
