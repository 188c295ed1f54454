"""The options of a request besides its sampling parameters."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..kernels.sampling.definition import GREEDY_BELOW
from .kept_kv import KVStart
from .sampling_params import MOST_TEMPERATURE


class _Drawn(Protocol):
    @property
    def seed(self) -> int: ...


class _Span(Protocol):
    @property
    def version(self) -> str: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def start(self) -> int: ...


@runtime_checkable
class Answer(Protocol):
    """A Completion, as far as a later request needs it."""

    @property
    def id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[float, ...]: ...
    @property
    def weight_versions(self) -> abc.Sequence[_Span]: ...
    @property
    def kv_starts(self) -> tuple[KVStart, ...]: ...
    @property
    def drawn_with(self) -> _Drawn | None: ...


@dataclass(frozen=True)
class Renewal:
    """An answer of other weights that a request renews, with what its noise follows from."""

    token_ids: tuple[int, ...]  # drawn again, as many as stay in a step
    seed: int  # of the counter-based noise, int64
    index: int = 0  # of the sample

    @classmethod
    def of(cls, answer: Answer) -> Renewal:
        """Return the renewal of an answer. Raises ValueError for one that does not say what it was drawn with."""
        return cls(answer.token_ids, _seed_of(answer), answer.index)


@dataclass(frozen=True)
class Begun:
    """The beginning of an answer that a request goes on with: its tokens stand, whichever weights have drawn them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one per token
    spans: tuple[tuple[str, str | None, int], ...]  # weight version, digest and first token of each run of them
    seed: int  # of the counter-based noise, int64
    index: int = 0  # of the sample
    kv_starts: tuple[KVStart, ...] = ()  # of those that were drawn over KV of earlier weights

    @classmethod
    def of(cls, answer: Answer) -> Begun:
        """Return an answer as a beginning. Raises ValueError for one that does not say what it was drawn with."""
        spans = tuple((span.version, span.digest, span.start) for span in answer.weight_versions)
        return cls(answer.token_ids, answer.logprobs, spans, _seed_of(answer), answer.index, answer.kv_starts)


def _seed_of(answer: Answer) -> int:
    if answer.drawn_with is None:
        raise ValueError(f"the answer {answer.id} does not say what it was drawn with")
    return answer.drawn_with.seed


@dataclass(frozen=True)
class RequestOptions:
    """A caller's options besides the sampling parameters."""

    logprob_start_len: int = -1  # prompt log-probabilities from this position on; -1: none
    top_logprobs_num: int = 0  # number of alternatives to report at each position
    token_ids_logprob: tuple[int, ...] = ()  # tokens whose log-probabilities to report at each position
    extra_key: str = ""  # separates prefix caches: requests share KV, and samples for drafts, only under equal keys
    draft_token_ids: tuple[int, ...] = ()  # an output that may come again, an older answer: changes no bit, only speed
    speculation: bool = True  # False: no drafts for this request
    # an answer (a Completion, or what is needed of one) to draw again; the request has one sample
    renewal: Renewal | None = None
    # an answer to go on with, likewise; the request has one sample, no grammar and no alternatives
    begun: Begun | None = None
    stream_when_final: bool = False  # nothing is streamed before the answer's end, when no commit can change it
    takes_back: bool = True  # False: a commit with in_flight="verify" lets its tokens stand, since its caller has them
    # give each answer a receipt: true with its tokens and log-probabilities, "digests" with their hashes only; None: as
    # the engine's settings say
    return_receipt: bool | str | None = None
    base_id: str = ""  # of the request that this is a sample of, where each sample is a request of its own
    max_kept_ids: int = 0  # report the tokens that the filters kept at each draw, at most so many in all; 0: none
    # divides the logits of the prompt's log-probabilities, from 1e-6 on; None: that of the draws does, as in a loss
    prompt_temperature: float | None = None

    def __post_init__(self) -> None:
        if self.extra_key is None:  # as SGLang's clients write it
            object.__setattr__(self, "extra_key", "")
        wrong = []
        for name, least in (("logprob_start_len", -1), ("top_logprobs_num", 0), ("max_kept_ids", 0)):
            if type(value := getattr(self, name)) is not int or value < least:
                wrong.append(f"{name} must be a whole number from {least} on, not {value!r:.100}")
        if (divisor := self.prompt_temperature) is not None and not (
            type(divisor) in (int, float) and GREEDY_BELOW <= divisor <= MOST_TEMPERATURE
        ):
            wrong.append(
                f"prompt_temperature must be a positive number from {GREEDY_BELOW:g} to {MOST_TEMPERATURE:g}, "
                f"not {divisor!r:.100}"
            )
        for name in ("extra_key", "base_id"):
            if not isinstance(value := getattr(self, name), str):
                wrong.append(f"{name} must be a text, not {value!r:.100}")
        for name in ("speculation", "stream_when_final", "takes_back"):
            if not isinstance(value := getattr(self, name), bool):
                wrong.append(f"{name} must be true or false, not {value!r:.100}")
        if not (self.return_receipt in (None, "digests") or isinstance(self.return_receipt, bool)):
            wrong.append(f'return_receipt must be true, false or "digests", not {self.return_receipt!r:.100}')
        wrong += [*self._wrong_ids("token_ids_logprob"), *self._wrong_ids("draft_token_ids"), *self._wrong_earlier()]
        if wrong:
            raise ValueError("; ".join(wrong))

    def _wrong_ids(self, name: str) -> list[str]:
        """Return what is wrong with token ids. Makes a tuple of them."""
        given: object = getattr(self, name)
        if isinstance(given, str) or not isinstance(given, abc.Sequence):
            return [f"{name} must be a sequence of token ids, not {given!r:.100}"]
        object.__setattr__(self, name, tuple(given))
        bad = [id for id in given if type(id) is not int or id < 0]
        return [f"{name} must be token ids, not {bad[:5]!r}"] if bad else []

    def _wrong_earlier(self) -> list[str]:
        """Return what is wrong with the earlier answers. Takes what is needed of a Completion."""
        wrong = []
        kinds: tuple[tuple[str, type[Renewal] | type[Begun]], ...] = (("renewal", Renewal), ("begun", Begun))
        for name, kind in kinds:
            if isinstance(value := getattr(self, name), Answer):
                object.__setattr__(self, name, kind.of(value))
            elif value is not None and not isinstance(value, kind):
                wrong.append(f"{name} must be a Completion or a {kind.__name__}, not {value!r:.100}")
        return wrong
