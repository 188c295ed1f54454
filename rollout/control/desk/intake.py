"""The making of requests from a caller's prompts and settings, with every check before one is queued."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ....kernels.sampling.draws import derive_seed
from ...giving_way import give_way, others_compute
from ...grammars.catalog import Grammars
from ...grammars.matcher import CompiledGrammar
from ...kept_kv import KeptKV, KVStart
from ...media.images import Images, PromptWithImages
from ...media.reader import IDS, ImageReader
from ...request_options import Begun, Renewal, RequestOptions
from ...sampling_params import LEAST_BIAS, SamplingParams
from ...sequences.detokenizer import IncrementalDetokenizer
from ...sequences.request import Request
from ...sequences.search_time import SearchTime
from ...sequences.sequence import Sequence as TokenSequence

_SHORT = reprlib.Repr()  # the repr of a long value takes seconds
_SHORT.maxother = 100
_INSTEAD_OF_MAPPINGS = {  # by a key that tells what was given
    "input_ids": "pass the lists in input_ids, without padding",
    "role": "write messages with the tokenizer's chat template first (apply_chat_template)",
}


class CheckedPrompt(NamedTuple):
    """A prompt that can run."""

    token_ids: list[int]
    images: Images | None = None


# A text, token ids, what a processor makes of one text and its images (input_ids, pixel_values and so on), or a prompt
# that an engine of the same model has checked.
Prompt = str | Sequence[int] | Mapping[str, object] | CheckedPrompt
Params = SamplingParams | Mapping[str, object] | None


class Settings(NamedTuple):
    """Checked parameters and the grammar that they ask for."""

    params: SamplingParams
    grammar: CompiledGrammar | None


class Intake:
    """Make requests and number them: the number is the order of arrival and gives each request its own seed."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        seed: int,
        grammars: Grammars,
        media_tokens: Mapping[int, str] | None = None,
        *,
        image_reader: ImageReader | None = None,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Create an intake. media_tokens: the kind of media that a token stands for; image_reader: None for a model
        that runs on text only."""
        self._images = image_reader
        self._max_model_len, self._eos_token_ids = max_model_len, eos_token_ids
        self._media_tokens = dict(media_tokens or {})
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._seed = seed
        self._search_time = SearchTime()
        self._num_made = 0

    def settings(self, params: Iterable[Params | Settings]) -> list[Settings]:
        """Return checked parameters with their compiled grammars, or settings as they are. Waits for the grammars: do
        not hold a lock.

        Raises ValueError naming every fault of the first wrong parameters, or of all grammars.
        """
        given = list(params)
        unread = [as_params(one) for one in given if not isinstance(one, Settings)]
        read = map(Settings, unread, self._grammars.compiled(unread))
        return [one if isinstance(one, Settings) else next(read) for one in given]

    def checked(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> CheckedPrompt:
        """Return a prompt that can run with these settings. Raises ValueError."""
        give_way()
        if not isinstance(options, RequestOptions):
            raise ValueError(f"options are RequestOptions, not {_SHORT.repr(options)}")
        its_ids, images = self._read(prompt)
        if self._tokenizer is None and params.needs_text:
            raise ValueError("stop strings need a tokenizer, and this engine has none")
        if options.logprob_start_len > len(its_ids):
            start = options.logprob_start_len
            raise ValueError(f"logprob_start_len {start} is beyond the {len(its_ids)} prompt tokens")
        if params.logit_bias:
            self._check_bias(params.logit_bias, params)
        for name, ids in (
            ("token_ids_logprob", options.token_ids_logprob),
            ("draft_token_ids", options.draft_token_ids),
        ):
            if bad := [id for id in ids if id >= self._vocab_size]:
                raise ValueError(f"{name} names {bad[:5]}, but the vocabulary ends at {self._vocab_size - 1}")
        if (num := len(options.draft_token_ids)) > (limit := self._max_model_len):
            raise ValueError(f"draft_token_ids has {num} tokens, more than the context has, which is {limit}")
        if options.renewal is not None:
            self._check_renewal(options.renewal, params)
        if options.begun is not None:
            self._check_begun(options.begun, params, options)
        return CheckedPrompt(its_ids, images)

    def read(
        self, prompt: Mapping[str, object], computing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> list[int]:
        """Return the token ids of a processor's output, with its images: a prompt that is not read again. computing:
        see `ImageReader.read`. Raises ValueError."""
        if self._images is None:
            raise ValueError("this engine takes no images: it runs on text")
        ids, images = self._images.read(prompt, computing)
        return ids if images is None else PromptWithImages(ids, images)

    def tokens_of(self, prompt: Prompt) -> CheckedPrompt:
        """Return the token ids and images of a prompt that is looked for in the cache. Raises ValueError, not for
        tokens of images without any: no block of them is cached."""
        if isinstance(prompt, Mapping) and IDS in prompt and self._images is not None:
            prompt = self.read(prompt)
        images: Images | None = None
        if isinstance(prompt, CheckedPrompt):
            prompt, images = prompt
        elif isinstance(prompt, PromptWithImages):
            images = prompt.images
        return CheckedPrompt(prompt_ids(prompt, self._tokenizer, self._vocab_size), images)

    def _read(self, prompt: Prompt) -> CheckedPrompt:
        """Return a prompt's token ids and images. Raises ValueError, also for other media, and for tokens of images
        without any."""
        images: Images | None = None
        if isinstance(prompt, Mapping) and "pixel_values" in prompt and IDS in prompt and self._images is not None:
            prompt = self.read(prompt)
        if is_checked := isinstance(prompt, CheckedPrompt):
            prompt, images = prompt
        elif isinstance(prompt, PromptWithImages):
            images = prompt.images
        if images is not None and self._images is None:
            raise ValueError("the prompt has images, which is not supported: the model runs on text")
        its_ids = prompt_ids(prompt, self._tokenizer, self._vocab_size)
        media = set() if is_checked else {kind for id, kind in self._media_tokens.items() if id in its_ids}
        if found := media - ({"image"} if images is not None else set()):
            remedy = "it runs on text" if self._images is None else "pass images as their processor gives them"
            raise ValueError(
                f"the prompt has placeholders of {' and '.join(sorted(found))} input, which is not supported: {remedy}"
            )
        return CheckedPrompt(its_ids, images)

    def _check_bias(self, bias: Mapping[int, float], params: SamplingParams) -> None:
        """Check that a `logit_bias` names tokens of the vocabulary and leaves one of them, which with `min_new_tokens`
        does not end the output. Raises ValueError."""
        if bad := [id for id in bias if id >= self._vocab_size]:
            raise ValueError(f"logit_bias names tokens {bad[:5]}, but the vocabulary ends at {self._vocab_size - 1}")
        banned, why = {id for id, value in bias.items() if value <= LEAST_BIAS}, ""
        if banned and params.min_new_tokens > 0:
            stops = self._eos_token_ids | params.stop_ids
            banned.update(id for id in stops if id < self._vocab_size)
            why = ", and min_new_tokens those that end the output"
        if len(banned) == self._vocab_size:
            raise ValueError(
                f"logit_bias bans all {self._vocab_size} tokens of the vocabulary (minus infinity, or at most "
                f"{LEAST_BIAS:g}){why}: leave one that can be drawn"
            )

    def _check_begun(self, begun: Begun, params: SamplingParams, options: RequestOptions) -> None:
        """Check an answer that is to go on with these settings. Raises ValueError."""
        _check_noise("a begun answer", begun)
        lists = begun.token_ids, begun.logprobs, begun.spans, begun.kv_starts
        if (bad_list := next((one for one in lists if not _is_list(one)), None)) is not None:
            raise ValueError(
                "a begun answer has sequences of token_ids, logprobs, spans and kv_starts, not "
                f"{type(bad_list).__name__} {_SHORT.repr(bad_list)}"
            )
        faults = _wrong_runs(begun)
        if params.n != 1 or options.renewal is not None:
            faults.append("is of one sample, which is not renewed")
        if params.is_constrained or options.top_logprobs_num or options.token_ids_logprob or options.max_kept_ids:
            faults.append("has no grammar and no alternatives")
        if len(begun.token_ids) >= max(params.max_new_tokens, 1):
            faults.append(f"has fewer tokens than max_new_tokens={params.max_new_tokens}, not {len(begun.token_ids)}")
        if len(begun.logprobs) != len(begun.token_ids):
            faults.append(f"has a log-probability for each of its {len(begun.token_ids)} tokens")
        if bad := [id for id in begun.token_ids if type(id) is not int or not 0 <= id < self._vocab_size]:
            faults.append(f"names tokens below {self._vocab_size}, not {bad[:5]!r}")
        stops = params.stop_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if not bad and (ended := sorted(stops.intersection(begun.token_ids))):
            faults.append(f"has not ended, as its tokens {ended} say")
        if faults:
            raise ValueError(f"a begun answer {'; '.join(faults)}")

    def _check_renewal(self, renewal: Renewal, params: SamplingParams) -> None:
        """Check an answer that is to be renewed with these settings. Raises ValueError."""
        _check_noise("a renewal", renewal)
        if params.n != 1:
            raise ValueError(f"a renewal is of one sample, and n is {params.n}")
        if not _is_list(given := renewal.token_ids):
            raise ValueError(f"a renewal has a sequence of token_ids, not {type(given).__name__} {_SHORT.repr(given)}")
        if bad := [id for id in renewal.token_ids if type(id) is not int or not 0 <= id < self._vocab_size]:
            raise ValueError(f"a renewal names tokens {bad[:5]!r}, but the vocabulary ends at {self._vocab_size - 1}")
        if (num := len(renewal.token_ids)) > params.max_new_tokens:
            raise ValueError(f"a renewal has {num} tokens, more than max_new_tokens, which is {params.max_new_tokens}")

    def numbers(self, num: int) -> int:
        """Reserve numbers for so many requests; returns the one before the first. The caller holds a lock."""
        self._num_made += num
        return self._num_made - num

    def requests(
        self, prompt: CheckedPrompt, settings: Settings, options: RequestOptions, ids: Sequence[str], number: int
    ) -> list[Request]:
        """Make one request per id, the samples of a checked prompt. Needs no lock.

        number: the one before the first request's, see `numbers`.
        """
        params, grammar = settings
        now = time.monotonic()
        requests = [
            self._request(id, prompt, params, options, index, now, number + 1 + index) for index, id in enumerate(ids)
        ]
        if grammar is not None:
            for request in requests:
                request.grammar = self._grammars.state(grammar, params)
        return requests

    def _request(
        self, id: str, prompt: CheckedPrompt, params: SamplingParams, options: RequestOptions, index: int, now: float,
        number: int,
    ) -> Request:  # fmt: skip
        give_way()
        its_ids = prompt.token_ids
        renewal, begun = options.renewal, options.begun
        if (given := renewal or begun) is not None:
            seed, index = given.seed, given.index
        elif params.sampling_seed is None:
            seed = derive_seed(self._seed, number)
        else:
            seed = derive_seed(params.sampling_seed, index)
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, its_ids, params, self._search_time)
        sequence = TokenSequence(id, its_ids)
        earlier = renewal.token_ids if renewal is not None else ()
        request = Request(sequence, params, options, index, seed, now, number, detokenizer, earlier=earlier,
                          images=prompt.images)  # fmt: skip
        if begun is not None:
            request.go_on_with(begun)
        return request


def _check_noise(what: str, given: Renewal | Begun) -> None:
    """Check the values that the noise of an earlier answer follows from. Raises ValueError."""
    wrong = []
    if type(given.seed) is not int or not -(2**63) <= given.seed < 2**63:
        wrong.append(f"the seed of {what} must be an int64, not {_SHORT.repr(given.seed)}")
    if type(given.index) is not int or given.index < 0:
        wrong.append(f"the index of {what} must be an integer of 0 or more, not {_SHORT.repr(given.index)}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _wrong_runs(begun: Begun) -> list[str]:
    """Return what is wrong with the log-probabilities of a begun answer, and with the weights that it names."""
    faults, num_tokens = [], len(begun.token_ids)
    if bad := [one for one in begun.logprobs if isinstance(one, bool) or not isinstance(one, int | float)]:
        faults.append(f"has numbers as logprobs, not {bad[:5]!r:.100}")
    if wrong := [one for one in begun.spans if not _is_span(one)]:
        faults.append(f"has spans of a version, a digest and a first token, not {wrong[:5]!r:.100}")
    elif num_tokens and (not begun.spans or begun.spans[0][2] != 0):
        faults.append("says from which weights its first token came")
    elif not _ascend([start for _, _, start in begun.spans], num_tokens):
        faults.append("has spans in the order of its tokens, each from another token on")
    if others := [one for one in begun.kv_starts if not _is_kv_start(one)]:
        faults.append(f"has kv_starts of kept KV, not {others[:5]!r:.100}")
    elif not _ascend([one.start for one in begun.kv_starts], num_tokens):
        faults.append("has kv_starts in the order of its tokens, each from another token on")
    return faults


def _is_list(given: object) -> bool:
    return isinstance(given, list | tuple)


def _is_span(given: object) -> bool:
    if not isinstance(given, tuple) or len(given) != 3:
        return False
    return isinstance(given[0], str) and isinstance(given[1], str | None) and type(given[2]) is int


def _is_kv_start(given: object) -> bool:
    if not isinstance(given, KVStart) or type(given.start) is not int:
        return False
    return isinstance(given.kept, tuple) and all(isinstance(run, KeptKV) for run in given.kept)


def _ascend(starts: list[int], num_tokens: int) -> bool:
    """Return whether runs of so many tokens begin at these, one behind the other."""
    return all(before < after for before, after in pairwise([-1, *starts, max(num_tokens, 1)]))


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt.

    Raises ValueError for an empty prompt, ids outside the vocabulary, text without a tokenizer, or text with half of a
    surrogate pair.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this engine has none: pass token ids")
        if half := _surrogate_in(prompt):
            raise ValueError(f"the prompt has {half}, half of a surrogate pair, which is no character")
        with others_compute():
            prompt = tokenizer(prompt)["input_ids"]
    if isinstance(prompt, Mapping):
        named = ", ".join(map(str, prompt))
        raise ValueError(
            "a prompt is a text or a list of token ids: "
            + next(
                (remedy for key, remedy in _INSTEAD_OF_MAPPINGS.items() if key in prompt),
                f"images and other inputs ({named}) are not supported: pass what the model's processor makes of them "
                "(input_ids, pixel_values and so on)",
            )
        )
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise _no_prompt(prompt)
    ids: list[Any] = list(prompt)
    if not ids:
        raise ValueError("the prompt is empty")
    bad = [id for id in ids if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < vocab_size]
    if bad:
        raise ValueError(f"prompt token ids must be integers from 0 to {vocab_size - 1}, not {bad[:5]}")
    return ids


def as_params(params: Params) -> SamplingParams:
    """Return a caller's parameters, a mapping or None too, as SamplingParams. Raises ValueError naming every fault."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping):
        raise ValueError(f"sampling parameters are SamplingParams or a mapping, not {_SHORT.repr(params)}")
    return SamplingParams.from_dict(params)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. Raises ValueError for what is neither: a tensor, an array of numbers."""
    if isinstance(prompts, str | bytes | bytearray | memoryview | Mapping):
        return [prompts]
    dtype = getattr(prompts, "dtype", None)  # of a tensor, or of an array, whose objects and texts may be prompts
    has_numbers = dtype is not None and getattr(dtype, "kind", None) not in ("O", "U")
    if isinstance(prompts, Set) or has_numbers:  # a set has no order
        raise _no_prompt(prompts)
    try:
        given: list[Any] = list(prompts)
    except TypeError:
        raise _no_prompt(prompts) from None
    return [given] if given and isinstance(given[0], int) else given


def _no_prompt(given: object) -> ValueError:
    remedy = ": tolist() makes a list of it" if hasattr(given, "tolist") else ""
    return ValueError(
        f"a prompt is a text or a list of token ids, not {type(given).__name__} {_SHORT.repr(given)[:100]}{remedy}"
    )


def _surrogate_in(text: str) -> str | None:
    """Return the first half of a surrogate pair in a text, quoted; None: there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None
