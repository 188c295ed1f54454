"""A request as the controller keeps it: one sequence, what was asked, and what has been answered so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..completion import Completion, FinishReason, ListedLogprobs, NextToken, TopLogprobs, WeightSpan
from ..grammars.jump import NO_JUMP, Jump
from ..grammars.state import GrammarState
from ..sampling_params import SamplingParams
from .detokenizer import IncrementalDetokenizer, StopRegexTimeout
from .sequence import Sequence
from .step import NewToken, ScheduledSequence, SequenceResult


@dataclass(frozen=True)
class RequestOptions:
    """What a caller may ask besides how to sample."""

    logprob_start_len: int = -1  # prompt log-probabilities from this position on; -1: none
    top_logprobs_num: int = 0  # how many alternatives to report at each position
    token_ids_logprob: tuple[int, ...] = ()  # tokens whose log-probabilities to report at each position
    extra_key: str = ""  # separates prefix caches: requests share KV only under equal keys

    def __post_init__(self) -> None:
        wrong = []
        if self.logprob_start_len < -1:
            wrong.append(f"logprob_start_len must be -1 or more, not {self.logprob_start_len}")
        if self.top_logprobs_num < 0:
            wrong.append(f"top_logprobs_num must not be negative, not {self.top_logprobs_num}")
        if bad := [id for id in self.token_ids_logprob if id < 0]:
            wrong.append(f"token_ids_logprob must not be negative, not {bad[:5]}")
        if wrong:
            raise ValueError("; ".join(wrong))


class SpanStart(NamedTuple):
    """From output token `start` on, until the next one: the weights that the tokens were sampled from."""

    version: str
    digest: str | None
    start: int


@dataclass(eq=False)  # a request is itself: identity, so that it can be a dict key
class Request:
    """One sequence of a request with its settings and its record of tokens, log-probabilities and weight versions."""

    sequence: Sequence
    params: SamplingParams
    options: RequestOptions
    index: int  # which of the n samples
    seed: int  # of the counter-based noise
    arrival_time: float  # seconds of time.monotonic()
    arrival_index: int
    detokenizer: IncrementalDetokenizer | None
    grammar: GrammarState | None = None  # that its output follows
    base_id: str = ""  # of the request whose sample this is
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs | None] = field(default_factory=list)
    listed_logprobs: list[ListedLogprobs] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)  # with a grammar: whether it, not the model, chose the token
    masked_probs: list[float] = field(default_factory=list)  # with a grammar: among what it allowed
    prompt_listed_logprobs: list[ListedLogprobs | None] = field(default_factory=list)
    next_token: NextToken | None = None
    span_starts: list[SpanStart] = field(default_factory=list)  # of the weights' versions over the output
    num_cached_tokens: int = 0
    num_retractions: int = 0  # also the incarnation: results of an earlier one are dropped
    finish_reason: FinishReason | None = None
    num_flights: int = 0  # steps in the air that hold rows of this incarnation; in a pipeline there may be several
    num_rows_in_flight: int = 0  # of those steps: rows that have not gone through this stage yet
    num_tokens_in_flight: int = 0  # that those steps will add to the sequence: 0 or 1
    num_jump_forward_tokens: int = 0  # output tokens that needed no step of their own
    newest_jump: Jump = NO_JUMP  # of the newest step
    num_undelivered: int = 0  # tokens of that step, its jump's included, that are not text yet
    num_tokens_streamed: int = 0
    num_tokens_taken_back: int = 0  # streamed ones that others have replaced since
    num_chars_streamed: int = 0
    # Seconds of time.monotonic(); None: not yet.
    first_step_time: float | None = None  # as its first rows were launched
    first_token_time: float | None = None  # as it was delivered
    last_token_time: float | None = None

    @property
    def id(self) -> str:
        return self.sequence.id

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.options.logprob_start_len >= 0

    @property
    def num_tokens_ahead(self) -> int:
        """Tokens there will be when the steps in the air are done."""
        return len(self.sequence.token_ids) + self.num_tokens_in_flight

    @property
    def num_processed_ahead(self) -> int:
        """Tokens that will have gone through this stage then."""
        return self.sequence.num_tokens_stage_processed + self.num_rows_in_flight

    @property
    def is_prefilling_ahead(self) -> bool:
        """Whether known tokens beyond the last one will still lack KV then."""
        sequence = self.sequence  # spelled out, as it is asked of every running request in every step
        num_processed = sequence.num_tokens_stage_processed + self.num_rows_in_flight
        return num_processed < len(sequence.token_ids) + self.num_tokens_in_flight - 1

    @property
    def is_ending(self) -> bool:
        """Whether the step in the air will reach the length that was asked for."""
        if not self.num_tokens_in_flight:
            return False
        return self.sequence.num_output_tokens + self.num_tokens_in_flight >= self.params.max_new_tokens

    def launched(self, item: ScheduledSequence) -> None:
        """A step with these rows was launched. Comes after the managers took it."""
        self.num_flights += 1
        self.num_rows_in_flight += item.num_tokens
        self.num_tokens_in_flight = int(item.start + item.num_tokens == self.sequence.num_tokens)

    def left_first_stage(self, item: ScheduledSequence) -> None:
        """These rows of a pipeline went through the first stage: the managers count them now."""
        if item.incarnation == self.num_retractions:
            self.num_rows_in_flight -= item.num_tokens

    def landed(self, item: ScheduledSequence) -> None:
        """The step with these rows is done. Only the newest one in the air adds a token."""
        if item.incarnation == self.num_retractions:
            self.num_flights -= 1
            if self.num_flights == 0:
                self.num_rows_in_flight = self.num_tokens_in_flight = 0

    def forget_flights(self) -> None:
        """What is in the air is no longer this request's: its results will be dropped."""
        self.num_flights = self.num_rows_in_flight = self.num_tokens_in_flight = 0

    @property
    def max_reusable_tokens(self) -> int:
        """Known tokens whose KV may come from the cache: one row at least must run, and prompt log-probabilities that
        are still owed need the rows before their tokens."""
        limit = self.sequence.num_tokens - 1
        if self.wants_prompt_logprobs:
            done = self.options.logprob_start_len + len(self.prompt_logprobs)
            if done < self.sequence.num_prompt_tokens:
                limit = min(limit, max(done - 1, 0))
        return limit

    def begin_tokens(self, jump: Jump) -> None:
        """A step's tokens are about to be recorded, after this jump."""
        self.newest_jump, self.num_undelivered = jump, 0
        self.num_jump_forward_tokens -= min(jump.num_rolled_back, len(jump.token_ids))
        if jump.num_rolled_back:
            self.roll_back(jump.num_rolled_back)

    def record_sampled(self, result: SequenceResult) -> None:
        """A step's only token; the sequence has it already. As `begin_tokens` and `record`, which jumps need."""
        assert result.logprob is not None
        self.newest_jump, self.num_undelivered = NO_JUMP, 1
        self.logprobs.append(result.logprob)
        if self.options.top_logprobs_num:
            self.top_logprobs.append(result.top_logprobs)
        if self.options.token_ids_logprob:
            self.listed_logprobs.append(result.listed_logprobs)
        if result.masked_prob is not None:
            self.masked_probs.append(result.masked_prob)
            self.forced.append(result.was_only_choice)

    def record(self, token: NewToken) -> None:
        """One more output token; the sequence has it already."""
        self.logprobs.append(token.logprob)
        if self.options.top_logprobs_num:
            self.top_logprobs.append(token.top_logprobs)
        if self.options.token_ids_logprob:
            self.listed_logprobs.append(token.listed_logprobs)
        if token.masked_prob is not None:
            self.masked_probs.append(token.masked_prob)
            self.forced.append(token.is_forced)
        self.num_jump_forward_tokens += token.is_jumped
        self.num_undelivered += 1

    def roll_back(self, num_tokens: int) -> None:
        """Forget what is recorded of the last output tokens. The sequence's tokens are changed elsewhere."""
        num_kept = len(self.logprobs) - num_tokens
        assert num_kept >= 0, self
        for record in (self.logprobs, self.top_logprobs, self.listed_logprobs, self.forced, self.masked_probs):
            del record[num_kept:]
        while self.span_starts and self.span_starts[-1].start >= num_kept:
            self.span_starts.pop()
        taken_back = max(self.num_tokens_streamed - num_kept, 0)
        self.num_tokens_taken_back += taken_back
        self.num_tokens_streamed -= taken_back

    def cut_output(self, num_tokens: int) -> None:
        """End the output after its first `num_tokens` tokens."""
        self.roll_back(len(self.logprobs) - num_tokens)
        self.sequence.undo_jump()  # of the next step, which is not wanted either
        del self.sequence.token_ids[self.sequence.num_prompt_tokens + num_tokens :]

    def tag_token(self, version: str, digest: str | None) -> None:
        """Record that the newest output token was sampled from this version of the weights."""
        last = self.span_starts[-1] if self.span_starts else None
        if last is None or last.version != version or last.digest != digest:
            self.span_starts.append(SpanStart(version, digest, len(self.logprobs) - 1))

    @property
    def spans(self) -> list[WeightSpan]:
        """Which version of the weights each output token was sampled from, contiguous."""
        ends = [*(span.start for span in self.span_starts[1:]), len(self.logprobs)]
        return [WeightSpan(*span, end) for span, end in zip(self.span_starts, ends, strict=False)]

    def text(self, *, final: bool) -> str:
        """Text so far: all of it when `final`, otherwise what can no longer change."""
        if self.detokenizer is None:
            return ""
        if final:
            return self.detokenizer.text
        try:
            return self.detokenizer.streamable_text
        except StopRegexTimeout:  # nothing new can be given out; the next token ends the request for this reason
            return ""

    def completion(self, version: str, digest: str | None) -> Completion:
        """The answer as it stands; `version` and `digest` are those of the weights now."""
        sequence, options = self.sequence, self.options
        has_top, has_listed = options.top_logprobs_num > 0, bool(options.token_ids_logprob)
        has_prompt = self.wants_prompt_logprobs
        return Completion(
            id=self.id,
            index=self.index,
            prompt_ids=tuple(sequence.token_ids[: sequence.num_prompt_tokens]),
            token_ids=tuple(sequence.settled_output()),
            text=self.text(final=self.finish_reason is not None),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            num_retractions=self.num_retractions,
            weight_version=version,
            weight_digest=digest,
            weight_versions=tuple(self.spans) or (WeightSpan(version, digest, 0, 0),),
            top_logprobs=tuple(self.top_logprobs) if has_top else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if has_prompt else None,
            prompt_top_logprobs=tuple(self.prompt_top_logprobs) if has_prompt and has_top else None,
            listed_logprobs=tuple(self.listed_logprobs) if has_listed else None,
            prompt_listed_logprobs=tuple(self.prompt_listed_logprobs) if has_prompt and has_listed else None,
            next_token=self.next_token,
            forced=tuple(self.forced) if self.params.is_constrained else None,
            masked_probs=tuple(self.masked_probs) if self.params.is_constrained else None,
            num_jump_forward_tokens=self.num_jump_forward_tokens,
        )
