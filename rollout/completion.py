"""The answer to a request, whole or as a stream."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .kept_kv import KVStart

if TYPE_CHECKING:
    from .media.images import Images
    from .request_options import RequestOptions
    from .sampling_params import SamplingParams


UNNAMED_VERSION = "default"  # of weights that no commit has named yet; SGLang's word


@dataclass(frozen=True)
class FinishReason:
    """The reason why a sequence ended. Example: `FinishReason("stop", matched="\\n")`."""

    type: Literal["stop", "length", "abort", "ignored"]
    matched: int | str | None = None  # the stop token id, or the stop string, that ended it
    length: int | None = None  # for "length": number of tokens at which it ended
    message: str | None = None  # for "abort" and "ignored", and a "length" that the pool forced
    by_engine: bool | None = None  # for "abort": True where no caller asked for it


@dataclass(frozen=True)
class WeightSpan:
    """A run of output tokens, start .. end-1, that were sampled from the weights of one version."""

    version: str
    digest: str | None
    start: int
    end: int


TopLogprobs = tuple[tuple[float, int], ...]  # (log-probability, token id), most likely first
ListedLogprobs = tuple[tuple[float, int], ...]  # likewise, of the requested token ids, in their order


@dataclass(frozen=True)
class NextToken:
    """The most likely token after a prompt that was only scored."""

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs = ()
    listed_logprobs: ListedLogprobs = ()


@dataclass(frozen=True)
class KeptIds:
    """The tokens that top_k, top_p and min_p kept at each draw: a trainer that leaves out the others has the
    distribution that was drawn from."""

    ids: array[int]  # int32, of one output token after another, ascending in each
    ends: array[int]  # int32, by output token: where its own end in `ids`


@dataclass(frozen=True)
class DraftCounts:
    """The drafts of one sequence that one source proposed."""

    source: str
    num_steps: int  # steps that ran rows of them
    num_drafted_tokens: int  # those rows
    num_accepted_tokens: int  # tokens of theirs that were the ones drawn, each of which saved a step


@dataclass(frozen=True)
class DrawnWith:
    """All that an answer follows from besides its prompt's tokens, its number and the weights."""

    params: SamplingParams
    options: RequestOptions
    seed: int  # of the counter-based noise of this sample
    images: Images | None = field(default=None, compare=False)  # of the prompt; they go to no other process


@dataclass(frozen=True)
class Completion:
    """The answer to one sequence of a request."""

    id: str
    index: int  # number of the sample, 0 .. n-1 of the request
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # the generated tokens, a stop token included
    text: str  # of token_ids, without the stop unless no_stop_trim
    logprobs: tuple[float, ...]  # log_softmax(logits / temperature)[token], one per token
    finish_reason: FinishReason | None  # None while the sequence still runs
    num_cached_tokens: int  # prompt tokens whose KV was in the cache
    num_retractions: int
    weight_version: str  # at the end
    weight_digest: str | None  # at the end; None if it was not computed
    weight_versions: tuple[WeightSpan, ...]  # contiguous over token_ids
    top_logprobs: tuple[TopLogprobs, ...] | None = None  # one entry per token; None unless requested
    prompt_logprobs: tuple[float | None, ...] | None = None  # prompt[logprob_start_len:], the very first is None
    prompt_top_logprobs: tuple[TopLogprobs | None, ...] | None = None
    listed_logprobs: tuple[ListedLogprobs, ...] | None = None  # of options.token_ids_logprob, one entry per token
    prompt_listed_logprobs: tuple[ListedLogprobs | None, ...] | None = None
    kept_ids: KeptIds | None = None  # with options.max_kept_ids, unless nothing is filtered
    next_token: NextToken | None = None  # with max_new_tokens=0
    # With a grammar, one per token: whether the model had no choice; also where its text was tokenised again.
    forced: tuple[bool, ...] | None = None
    # with a grammar: probability of the allowed tokens together; 1.0 if forced
    masked_probs: tuple[float, ...] | None = None
    num_jump_forward_tokens: int = 0  # tokens that needed no step of their own
    drafts: tuple[DraftCounts, ...] = ()  # by source, of the steps that had a draft; changes no other field
    num_kept_tokens: int = 0  # first tokens of an answer of other weights that came again under these
    drawn_with: DrawnWith | None = None
    receipt: dict[str, Any] | None = None  # if asked for, see receipt.py
    kv_starts: tuple[KVStart, ...] = ()  # of tokens drawn over KV of earlier weights; empty: there are none
    epoch: int | None = field(default=None, compare=False)  # `Engine.epoch` at the first token that was drawn here

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def why_unfinished(self) -> str | None:
        """Why the engine has ended it before it ended by itself or had its largest number of tokens; None: it did not.
        It is no whole sample then."""
        reason = self.finish_reason
        if reason is None:
            return "it has no end"
        if reason.type in ("stop", "length") and reason.message is None and self.token_ids:
            return None
        return reason.message or f"it ended by {reason.type} after {len(self.token_ids)} tokens"

    @property
    def num_draft_steps(self) -> int:
        """The number of steps that ran rows of a draft."""
        return sum(counts.num_steps for counts in self.drafts)

    @property
    def num_drafted_tokens(self) -> int:
        """The number of those rows."""
        return sum(counts.num_drafted_tokens for counts in self.drafts)

    @property
    def num_accepted_tokens(self) -> int:
        """The number of drafted tokens that were the ones drawn: steps that the sequence did not need."""
        return sum(counts.num_accepted_tokens for counts in self.drafts)


@dataclass(frozen=True)
class StreamChunk:
    """The tokens that one step added to a streamed sequence; text that may become a stop string is held back."""

    id: str
    index: int
    token_ids: tuple[int, ...]  # the new ones
    logprobs: tuple[float, ...]  # of the new ones
    text: str  # the new text
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    weight_version: str = ""  # of the newest token, or of the weights at the end
    top_logprobs: tuple[TopLogprobs, ...] = ()  # of the new ones, if requested
    listed_logprobs: tuple[ListedLogprobs, ...] = ()
    num_taken_back: int = 0  # number of last tokens of earlier chunks that these replace
    num_chars_taken_back: int = 0  # likewise of the text: 0, unless the answer begins again under new weights
    completion: Completion | None = None  # on the last chunk: the whole answer
    weight_digest: str | None = None  # of the weights that drew the new tokens; None: none, or several
