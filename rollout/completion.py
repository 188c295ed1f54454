"""What a request is answered with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FinishReason:
    """Why a sequence ended. Example: `FinishReason("stop", matched="\\n")`."""

    type: Literal["stop", "length", "abort", "ignored"]
    matched: int | str | None = None  # the stop token id, or the stop string, that ended it
    length: int | None = None  # for "length": how many tokens it was ended at
    message: str | None = None  # for "abort" and "ignored", and a "length" that the pool forced


@dataclass(frozen=True)
class WeightSpan:
    """Output tokens start .. end-1 were sampled from the weights of this version."""

    version: str
    digest: str | None
    start: int
    end: int


TopLogprobs = tuple[tuple[float, int], ...]  # (log-probability, token id), most likely first
ListedLogprobs = tuple[tuple[float, int], ...]  # likewise, of the token ids that were asked for, in that order


@dataclass(frozen=True)
class NextToken:
    """What would have come after a prompt that was only scored."""

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs = ()
    listed_logprobs: ListedLogprobs = ()


@dataclass(frozen=True)
class Completion:
    """The answer to one sequence of a request."""

    id: str
    index: int  # which of the request's n samples
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # what was generated, a stop token included
    text: str  # of token_ids, without what stopped it unless no_stop_trim
    logprobs: tuple[float, ...]  # log_softmax(logits / temperature)[token], one per token
    finish_reason: FinishReason | None  # None while the sequence still runs
    num_cached_tokens: int  # prompt tokens whose KV was there already
    num_retractions: int
    weight_version: str  # at the end
    weight_digest: str | None  # at the end; None where it has not been computed
    weight_versions: tuple[WeightSpan, ...]  # contiguous over token_ids
    top_logprobs: tuple[TopLogprobs, ...] | None = None  # one entry per token, when asked for
    prompt_logprobs: tuple[float | None, ...] | None = None  # prompt[logprob_start_len:], the very first is None
    prompt_top_logprobs: tuple[TopLogprobs | None, ...] | None = None
    listed_logprobs: tuple[ListedLogprobs, ...] | None = None  # of options.token_ids_logprob, one entry per token
    prompt_listed_logprobs: tuple[ListedLogprobs | None, ...] | None = None
    next_token: NextToken | None = None  # with max_new_tokens=0
    # With a grammar, one per token: whether the model had no choice; also where text that it chose got other tokens.
    forced: tuple[bool, ...] | None = None
    masked_probs: tuple[float, ...] | None = None  # with a grammar: probability among what it allowed; 1.0 if forced
    num_jump_forward_tokens: int = 0  # tokens that needed no step of their own

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to a streamed sequence; text that may still become a stop string is held back."""

    id: str
    index: int
    token_ids: tuple[int, ...]  # the new ones
    logprobs: tuple[float, ...]  # of the new ones
    text: str  # the new text
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    weight_version: str = ""  # of the newest token, or of the weights at the end
    top_logprobs: tuple[TopLogprobs, ...] = ()  # of the new ones, when asked for
    listed_logprobs: tuple[ListedLogprobs, ...] = ()
    num_taken_back: int = 0  # of earlier chunks' tokens, the last ones, that these replace; the text goes on
    completion: Completion | None = None  # on the last chunk: the whole answer
