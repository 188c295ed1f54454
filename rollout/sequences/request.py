"""A request of the controller: one sequence, its settings, and its output so far."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import attrgetter
from typing import ClassVar

from ..completion import Completion, DrawnWith, FinishReason, KeptIds, NextToken, WeightSpan
from ..grammars.state import GrammarState
from ..media.images import Images
from ..request_options import Begun, RequestOptions
from ..sampling_params import SamplingParams
from .detokenizer import IncrementalDetokenizer, StopRegexTimeout
from .in_flight import InFlight
from .output_record import OutputRecord, SpanStart
from .sequence import Sequence

_ID_BYTES = 16


def fresh_ids(num: int) -> list[str]:
    """Return random ids of 32 hexadecimal digits. All come from one call of the system, because each call gives the
    interpreter's lock up, which other threads then hold for a while."""
    digits, length = os.urandom(_ID_BYTES * num).hex(), 2 * _ID_BYTES
    return [digits[at : at + length] for at in range(0, len(digits), length)]


@dataclass(eq=False)  # equal by identity, so that it can be a dict key
class Request:
    """One sequence of a request with its settings and its record of tokens, log-probabilities and weight versions."""

    sequence: Sequence
    params: SamplingParams
    options: RequestOptions
    index: int  # of the sample, from 0 to n - 1
    seed: int  # of the counter-based noise
    arrival_time: float  # seconds of time.monotonic()
    arrival_index: int
    detokenizer: IncrementalDetokenizer | None
    grammar: GrammarState | None = None  # the grammar that its output follows
    base_id: str = ""  # the id of the request that this is a sample of
    prompt_id: str = ""  # the id of its prompt, of which the request may have several
    earlier: tuple[int, ...] = ()  # an answer of other weights, whose tokens are drawn again, as many as stay in a step
    record: OutputRecord = field(init=False)
    rotary_offset: int = field(init=False)  # of the module's rotary positions to those of the tokens behind the prompt
    draws_alone: bool = field(init=False)  # a decode step reads nothing of it but its tokens, and only a stop token
    # needs the host before the next one is drawn
    in_flight: InFlight = field(init=False, default_factory=InFlight)
    images: Images | None = None  # of its prompt
    aborted: FinishReason | None = None  # before it came: it ends so, and never runs
    next_token: NextToken | None = None
    num_cached_tokens: int = 0
    num_retractions: int = 0  # also the incarnation: results of an earlier one are dropped
    finish_reason: FinishReason | None = None
    # Seconds of time.monotonic(); None: not yet.
    first_step_time: float | None = None  # when its first rows were launched
    first_token_time: float | None = None  # when it was delivered
    last_token_time: float | None = None

    def __post_init__(self) -> None:
        options = self.options
        self.record = OutputRecord(
            options.top_logprobs_num > 0, bool(options.token_ids_logprob),
            options.max_kept_ids > 0 and self.params.has_filters,
        )  # fmt: skip
        self.rotary_offset = 0 if self.images is None else self.images.offset
        if options.logprob_start_len == 0:
            self.record.begin_prompt()
        reports_more = options.top_logprobs_num or options.token_ids_logprob or self.record.wants_kept
        self.draws_alone = self.params.draws_alone and not reports_more and not self.wants_prompt_logprobs

    id: ClassVar[str] = property(attrgetter("sequence.id"))  # type: ignore[assignment]  # without a call of Python

    @property
    def samples_key(self) -> str:
        """The key that separates samples for drafts of prompts of equal tokens."""
        key = self.options.extra_key
        return key if self.images is None else f"{key}\n{self.images.digest}"

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.options.logprob_start_len >= 0

    @property
    def num_tokens_ahead(self) -> int:
        """The number of tokens after the steps in flight."""
        return len(self.sequence.token_ids) + self.in_flight.num_tokens

    @property
    def num_processed_ahead(self) -> int:
        """The number of tokens that this stage will have processed after the steps in flight."""
        return self.sequence.num_tokens_stage_processed + self.in_flight.num_rows

    @property
    def is_prefilling_ahead(self) -> bool:
        """Whether known tokens before the last one will still lack KV after the steps in flight."""
        sequence, in_flight = self.sequence, self.in_flight  # inlined: read for every running request in every step
        num_processed = sequence.num_tokens_stage_processed + in_flight.num_rows
        return num_processed < len(sequence.token_ids) + in_flight.num_tokens - 1

    @property
    def is_ending(self) -> bool:
        """Whether the step in flight will reach the requested length."""
        if not self.in_flight.num_tokens:
            return False
        return self.sequence.num_output_tokens + self.in_flight.num_tokens >= self.params.max_new_tokens

    @property
    def may_be_rewritten(self) -> bool:
        """Whether jumps may replace tokens that were drawn."""
        return self.grammar is not None and self.grammar.mode == "text"

    @property
    def may_take_back(self) -> bool:
        """Whether the next jump may replace output tokens."""
        if not self.may_be_rewritten:
            return False
        return self.sequence.num_output_tokens > 0 and self.sequence.jump_start is None

    @property
    def max_reusable_tokens(self) -> int:
        """The number of known tokens whose KV may come from the cache.

        At least one row must run, and missing prompt log-probabilities need the rows before their tokens.
        """
        limit = self.sequence.num_tokens - 1
        if self.wants_prompt_logprobs:
            done = self.options.logprob_start_len + len(self.record.prompt_logprobs)
            if done < self.sequence.num_prompt_tokens:
                limit = min(limit, max(done - 1, 0))
        return limit

    def num_rows_of_whole_blocks(self, start: int, num_rows: int) -> int:
        """Return the number of rows of a chunk from row `start`: at most `num_rows`, unless it begins with an image
        whose tokens see each other both ways, for such are computed together."""
        images = self.images
        return num_rows if images is None else images.whole_blocks(start, start + num_rows) - start

    @property
    def rest_of_earlier(self) -> tuple[int, ...]:
        """The tokens of the earlier answer that come next; none where the output has left it."""
        output = self.sequence.output_ids
        return self.earlier[len(output) :] if output == list(self.earlier[: len(output)]) else ()

    @property
    def num_kept_tokens(self) -> int:
        """The number of first tokens of the earlier answer that were drawn again."""
        if not self.earlier:  # as of nearly every request
            return 0
        pairs = zip(self.sequence.settled_output(), self.earlier, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def begin_again(self) -> Request:
        """Return this request as it came, with its output as the earlier answer. Changes nothing of this one.

        Nothing of its record stays: what its caller has received is taken back.
        """
        sequence, output = self.sequence, tuple(self.sequence.settled_output())
        again = replace(
            self,
            sequence=Sequence(self.id, sequence.token_ids[: sequence.num_prompt_tokens]),
            detokenizer=None if self.detokenizer is None else self.detokenizer.begin_again(),
            grammar=None if self.grammar is None else self.grammar.begin_again(),
            earlier=self.earlier if self.earlier[: len(output)] == output else output,
            num_retractions=self.num_retractions + 1,
            next_token=None,
        )
        again.record.num_kept = again.record.num_chars_kept = 0
        if self.options.begun is not None:  # stands, whichever weights have drawn it
            again.go_on_with(self.options.begun)
        return again

    def go_on_with(self, begun: Begun) -> None:
        """Take the beginning of an answer as this request's output so far. Nothing of it has run here.

        Raises ValueError for one that completes a stop of the request, or whose text cannot be searched for one.
        """
        self.sequence.token_ids += begun.token_ids
        self.record.logprobs += begun.logprobs
        self.record.span_starts += [SpanStart(*span) for span in begun.spans]
        self.record.kv_starts += begun.kv_starts
        if self.detokenizer is None:
            return
        try:
            match = self.detokenizer.append(begun.token_ids)
        except StopRegexTimeout as error:
            raise ValueError(f"a begun answer cannot go on: {error}") from error
        if match is not None:
            raise ValueError(f"a begun answer has not ended, and its tokens complete the stop {match.stop!r}")

    def cut_output(self, num_tokens: int) -> None:
        """End the output after its first `num_tokens` tokens."""
        self.record.roll_back(len(self.record.logprobs) - num_tokens)
        self.sequence.undo_jump()  # the jump belongs to the next step, which will not run
        self.sequence.cut(self.sequence.num_prompt_tokens + num_tokens)

    def text(self, *, final: bool) -> str:
        """Return the text so far: all of it if `final`, otherwise the part that can no longer change."""
        if self.detokenizer is None:
            return ""
        if final:
            return self.detokenizer.text
        try:
            return self.detokenizer.streamable_text
        except StopRegexTimeout:  # no new text is certain; the next token ends the request with this error
            return ""

    def completion(self, version: str, digest: str | None) -> Completion:
        """Return the answer so far. version and digest: of the current weights."""
        sequence, record = self.sequence, self.record
        has_top, has_listed = record.wants_top, record.wants_listed
        has_prompt = self.wants_prompt_logprobs
        return Completion(
            id=self.id,
            index=self.index,
            prompt_ids=tuple(sequence.token_ids[: sequence.num_prompt_tokens]),
            token_ids=tuple(sequence.settled_output()),
            text=self.text(final=self.finish_reason is not None),
            logprobs=tuple(record.logprobs),
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            num_retractions=self.num_retractions,
            weight_version=version,
            weight_digest=digest,
            weight_versions=tuple(record.spans) or (WeightSpan(version, digest, 0, 0),),
            top_logprobs=tuple(record.top_logprobs) if has_top else None,
            prompt_logprobs=tuple(record.prompt_logprobs) if has_prompt else None,
            prompt_top_logprobs=tuple(record.prompt_top_logprobs) if has_prompt and has_top else None,
            listed_logprobs=tuple(record.listed_logprobs) if has_listed else None,
            prompt_listed_logprobs=tuple(record.prompt_listed_logprobs) if has_prompt and has_listed else None,
            kept_ids=KeptIds(record.kept_ids[:], record.kept_ends[:]) if record.wants_kept else None,
            next_token=self.next_token,
            forced=tuple(record.forced) if self.params.is_constrained else None,
            masked_probs=tuple(record.masked_probs) if self.params.is_constrained else None,
            num_jump_forward_tokens=record.num_jump_forward_tokens,
            drafts=tuple(record.drafts.values()),
            num_kept_tokens=self.num_kept_tokens,
            drawn_with=DrawnWith(self.params, self.options, self.seed, self.images),
            kv_starts=tuple(record.kv_starts),
            epoch=record.first_epoch,
        )
