"""Log-probabilities and weight versions of a request's tokens, as parallel lists."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from ..completion import DraftCounts, ListedLogprobs, TopLogprobs, WeightSpan
from ..grammars.jump import NO_JUMP, Jump
from ..kept_kv import KeptKV, KVStart
from .step import NewToken, SequenceResult


class SpanStart(NamedTuple):
    """The weights of the output tokens from `start` to the next span's start."""

    version: str
    digest: str | None
    start: int


class RecordedJump(NamedTuple):
    """A jump of the mode `text`: where it stood in the output, and the tokens that it removed and inserted there."""

    at: int  # number of output tokens before the inserted ones
    removed: tuple[int, ...]  # draws that are no part of the output
    inserted: tuple[int, ...]


class ScoredToken(NamedTuple):
    """A token of a jump whose rows have run in part, and the weights that scored it, with their KV."""

    token: NewToken
    version: str
    digest: str | None
    epoch: int
    kept_kv: tuple[KeptKV, ...]  # when it was scored


@dataclass(eq=False, slots=True)
class OutputRecord:
    """Record data of each output token; the sequence has the token ids. A rollback cuts all lists together."""

    wants_top: bool  # whether alternatives are reported at each position
    wants_listed: bool  # whether log-probabilities of named tokens are reported
    wants_kept: bool = False  # whether the tokens that the filters kept are reported
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    listed_logprobs: list[ListedLogprobs] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)  # with a grammar: whether it left no choice of the token
    masked_probs: list[float] = field(default_factory=list)  # with a grammar: probabilities among the allowed tokens
    kept_ids: array[int] = field(default_factory=lambda: array("i"))  # that the filters kept, of one draw after another
    kept_ends: array[int] = field(default_factory=lambda: array("i"))  # by token: where its own end in `kept_ids`
    span_starts: list[SpanStart] = field(default_factory=list)  # of the weights' versions over the output
    first_epoch: int | None = None  # the KV epoch of the first output token
    # These three are never cut: each is of the weights that ran its row first.
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs | None] = field(default_factory=list)
    prompt_listed_logprobs: list[ListedLogprobs | None] = field(default_factory=list)
    num_jump_forward_tokens: int = 0  # output tokens without a step of their own
    newest_jump: Jump = NO_JUMP  # before the newest sampled token
    scored: list[ScoredToken] = field(default_factory=list)  # of the unsettled jump: not part of the output yet
    num_jump_steps: int = 0  # steps that have run rows of the unsettled jump
    newest_jump_steps: int = 0  # steps that ran the rows of `newest_jump`
    num_undelivered: int = 0  # tokens of that step, its jump's included, that are not text yet
    drafts: dict[str, DraftCounts] = field(default_factory=dict)  # by source: also of steps whose tokens were cut later
    num_kept: int | None = None  # tokens that no rollback has cut since this was last set to None; None: all
    kept_kv: tuple[KeptKV, ...] = ()  # of the sequence now: of weights before the present ones
    kv_starts: list[KVStart] = field(default_factory=list)  # empty: no token was drawn with kept KV
    jumps: list[RecordedJump] = field(default_factory=list)  # in their order, also those that later ones replaced
    num_chars_kept: int | None = None  # likewise of the text, which changes only where an answer begins again

    def begin_prompt(self) -> None:
        """Record that the first prompt token has no log-probability."""
        self.prompt_logprobs.append(None)
        if self.wants_top:
            self.prompt_top_logprobs.append(None)
        if self.wants_listed:
            self.prompt_listed_logprobs.append(None)

    def add_prompt(self, result: SequenceResult) -> None:
        """Record the prompt tokens that a step has scored."""
        self.prompt_logprobs += result.prompt_logprobs
        self.prompt_top_logprobs += result.prompt_top_logprobs
        self.prompt_listed_logprobs += result.prompt_listed_logprobs

    def begin_tokens(self, jump: Jump) -> list[ScoredToken]:
        """Prepare for the tokens of a step, after those of a jump that it settles, if any: cut the tokens that the jump
        rolls back. Returns the jump's scored tokens, for `add`."""
        self.newest_jump, self.num_undelivered = jump, 0
        self.newest_jump_steps, self.num_jump_steps = self.num_jump_steps, 0
        self.num_jump_forward_tokens -= min(jump.num_rolled_back, len(jump.token_ids))
        if jump.num_rolled_back:
            self.roll_back(jump.num_rolled_back)
        scored, self.scored = self.scored, []
        assert len(scored) == len(jump.token_ids), "the jump's tokens"
        return scored

    def forget_scored(self) -> None:
        """Forget the scores of an unsettled jump, which is undone."""
        self.num_jump_steps = 0
        self.scored.clear()

    def add_sampled(self, result: SequenceResult) -> None:
        """Record a step's only token, which the sequence has already. Steps with more use `begin_tokens` and `add`."""
        assert result.logprob is not None
        self.newest_jump, self.num_undelivered = NO_JUMP, 1
        self.logprobs.append(result.logprob)
        if self.wants_top:
            self.top_logprobs.append(result.top_logprobs)
        if self.wants_listed:
            self.listed_logprobs.append(result.listed_logprobs)
        if self.wants_kept:
            self._add_kept(result.kept_ids)
        if result.masked_prob is not None:
            self.masked_probs.append(result.masked_prob)
            self.forced.append(result.was_only_choice)

    def add(self, token: NewToken) -> None:
        """Record one more output token, which the sequence has already."""
        self.logprobs.append(token.logprob)
        if self.wants_top:
            self.top_logprobs.append(token.top_logprobs)
        if self.wants_listed:
            self.listed_logprobs.append(token.listed_logprobs)
        if self.wants_kept:
            self._add_kept(token.kept_ids)
        if token.masked_prob is not None:
            self.masked_probs.append(token.masked_prob)
            self.forced.append(token.is_forced)
        self.num_jump_forward_tokens += token.is_jumped
        self.num_undelivered += 1

    def _add_kept(self, ids: tuple[int, ...]) -> None:
        self.kept_ids.extend(ids)
        self.kept_ends.append(len(self.kept_ids))

    @property
    def num_delivered(self) -> int:
        """The number of output tokens that are text; before a delivery, without those that the step's jump replaces."""
        if not self.num_undelivered:
            return len(self.logprobs)
        return len(self.logprobs) - self.num_undelivered + self.newest_jump.num_rolled_back

    def count_draft(self, source: str, num_drafted: int, num_accepted: int) -> None:
        """Count the draft of a committed step."""
        so_far = self.drafts.get(source) or DraftCounts(source, 0, 0, 0)
        num_drafted, num_accepted = so_far.num_drafted_tokens + num_drafted, so_far.num_accepted_tokens + num_accepted
        self.drafts[source] = DraftCounts(source, so_far.num_steps + 1, num_drafted, num_accepted)

    def tag_token(self, version: str, digest: str | None, epoch: int, kept_kv: tuple[KeptKV, ...]) -> None:
        """Record that the newest output token was sampled from this version of the weights, in this KV epoch, over this
        KV of earlier weights."""
        if len(self.logprobs) == 1:
            self.first_epoch = epoch
        last = self.span_starts[-1] if self.span_starts else None
        if last is None or last.version != version or last.digest != digest:
            self.span_starts.append(SpanStart(version, digest, len(self.logprobs) - 1))
        if kept_kv or self.kv_starts:
            newest = self.kv_starts[-1].kept if self.kv_starts else ()
            if newest != kept_kv:
                self.kv_starts.append(KVStart(len(self.logprobs) - 1, kept_kv))

    def keep_kv(self, version: str, digest: str | None, num_rows: int) -> None:
        """Note that the KV of the first `num_rows` rows, computed so far, stays at a commit. version, digest: before
        the commit."""
        if num_rows > (self.kept_kv[-1].end if self.kept_kv else 0):
            self.kept_kv = (*self.kept_kv, KeptKV(version, digest, num_rows))

    def cut_kept_kv(self, num_rows: int) -> None:
        """Note that the rows from number `num_rows` on will be computed again."""
        if self.kept_kv and self.kept_kv[-1].end > num_rows:
            before = [kept for kept in self.kept_kv if kept.end < num_rows]
            cut = next(kept for kept in self.kept_kv if kept.end >= num_rows)
            self.kept_kv = (*before, cut._replace(end=num_rows)) if num_rows else ()

    def roll_back(self, num_tokens: int) -> None:
        """Remove the last output tokens from all lists. The sequence's tokens are changed elsewhere."""
        num_kept = len(self.logprobs) - num_tokens
        assert num_kept >= 0, self
        for values in (self.logprobs, self.top_logprobs, self.listed_logprobs, self.forced, self.masked_probs):
            del values[num_kept:]
        del self.kept_ends[num_kept:]
        del self.kept_ids[self.kept_ends[-1] if self.kept_ends else 0 :]
        while self.span_starts and self.span_starts[-1].start >= num_kept:
            self.span_starts.pop()
        while self.kv_starts and self.kv_starts[-1].start >= num_kept:
            self.kv_starts.pop()
        self.num_kept = num_kept if self.num_kept is None else min(self.num_kept, num_kept)

    @property
    def spans(self) -> list[WeightSpan]:
        """The contiguous spans of output tokens that were sampled from one version of the weights each."""
        ends = [*(span.start for span in self.span_starts[1:]), len(self.logprobs)]
        return [WeightSpan(*span, end) for span, end in zip(self.span_starts, ends, strict=False)]
