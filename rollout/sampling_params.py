"""The sampling settings of one request: field names, defaults and ranges of SGLang's clients."""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import regex
from regex import Pattern

from ..kernels.sampling.definition import GREEDY_BELOW
from .stop_patterns import MAX_PATTERN_SIZE, pattern_size

MOST_TEMPERATURE = 1e6  # far beyond it a ban would be no more than noise, and float32 has no such number
LEAST_REPETITION_PENALTY = 1e-6  # divided by much less, a logit would be infinite
LEAST_BIAS = -1e30  # a logit_bias of this much or less bans its token
MAX_SAMPLES = 1 << 16  # of a prompt: each is a sequence from the moment when it is asked for
MAX_STOPS = 32
MAX_STOP_REGEX_BYTES = 256
MAX_KEPT_SPECIAL = 256  # tokens
MAX_MATCH_S = 0.1  # to find out whether a stop pattern matches the empty text
NOT_SUPPORTED = ("beam_width",)
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_SHORT = reprlib.Repr()  # the repr of a long value takes seconds
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20


_OURS = {"max_tokens": " (here max_new_tokens)", "seed": " (here sampling_seed)"}  # keys of OpenAI's requests


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request. Immutable.

    `stop` and `stop_regex` also take a string, a list or None, `stop_token_ids` and
    `kept_special_tokens` a list or None, `top_k` 0 for -1 and
    `stop` "" for none, as other servers do, `logit_bias` string
    keys, `json_schema` and `structural_tag` a JSON object; they are converted to the declared types. ValueError names
    every field with a wrong type or a value out of range.
    """

    max_new_tokens: int = 128  # longest output, in tokens; 0: score the prompt only
    stop: tuple[str, ...] = ()  # texts that end the output; found in the generated text, also across tokens
    stop_token_ids: tuple[int, ...] = ()  # these tokens end the output, besides the end-of-sequence tokens
    stop_regex: tuple[str, ...] = ()  # patterns that end the output; searched in its last characters
    temperature: float = 1.0  # divides the logits, up to 1e6; below 1e-6: greedy
    top_p: float = 1.0  # in (0, 1]; the most likely tokens up to this probability
    top_k: int = -1  # this many most likely tokens; -1: all
    min_p: float = 0.0  # in [0, 1], relative to the most likely token
    frequency_penalty: float = 0.0  # in [-2, 2]; taken off a logit for each occurrence of its token
    presence_penalty: float = 0.0  # in [-2, 2]; taken off a logit once its token has occurred
    repetition_penalty: float = 1.0  # in [1e-6, 2]; scales the logits of tokens that have occurred
    min_new_tokens: int = 0  # neither end of sequence nor a stop before this many, but where a grammar ends
    n: int = 1  # samples per prompt; at most 65536
    ignore_eos: bool = False  # do not stop at an end-of-sequence token
    skip_special_tokens: bool = True  # leave special tokens out of the text
    kept_special_tokens: tuple[int, ...] = ()  # special tokens that stay in the text although others are left out
    spaces_between_special_tokens: bool = True  # put spaces between special tokens of the text
    no_stop_trim: bool = False  # keep the stop in the text
    stream_interval: int | None = None  # tokens between two streamed pieces
    logit_bias: Mapping[int, float] | None = None  # added to the logits; minus infinity bans a token
    sampling_seed: int | None = None  # int64; None: the engine draws one
    custom_params: Mapping[str, Any] | None = None  # not read by the engine; of answers, on the first rank alone
    json_schema: str | None = None  # the output is JSON that follows this schema; "$$ANY$$": any JSON
    regex: str | None = None  # the output matches this pattern from its first character to its last
    ebnf: str | None = None  # the output matches the rule `root` of this grammar (GBNF)
    structural_tag: str | None = None  # parts of the output, between tags, follow schemas; in xgrammar's JSON
    # rule for text that a grammar forces: "text", "exact" or "off"; None: the engine's default
    jump_forward: str | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        # The class is frozen for its users; here its fields get their final form, once.
        given: object = self.stop
        object.__setattr__(self, "stop", () if given == "" else _strings(given))
        object.__setattr__(self, "top_k", -1 if _is_int(self.top_k, 0, 0) else self.top_k)
        object.__setattr__(self, "stop_regex", _strings(self.stop_regex))
        object.__setattr__(self, "stop_token_ids", _listed(self.stop_token_ids))
        object.__setattr__(self, "kept_special_tokens", _listed(self.kept_special_tokens))
        object.__setattr__(self, "logit_bias", _integer_keys(self.logit_bias))
        for name in ("json_schema", "structural_tag"):
            object.__setattr__(self, name, _json_text(getattr(self, name)))
        for name, (accepts, wanted) in _RULES.items():
            value = getattr(self, name)
            if not accepts(value):
                problems.append(f"{name} must be {wanted}, not {_SHORT.repr(value)}")
        problems += self._compile_patterns()
        if len(grammars := [name for name in GRAMMARS if getattr(self, name) is not None]) > 1:
            problems.append(f"{', '.join(grammars)}: only one of them can constrain an output")
        if not problems and self.min_new_tokens > self.max_new_tokens:
            problems.append(f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}")
        if problems:
            raise ValueError("sampling parameters: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Build from a JSON object; null means the default.

        Raises ValueError naming every unknown key, every unsupported setting and every wrong value.
        """
        given = {name: value for name, value in mapping.items() if value is not None}
        known = {field.name for field in fields(cls)}
        problems = [
            f"unknown key {name!r}{_OURS.get(name, '')}"
            for name in mapping
            if name not in known and name not in NOT_SUPPORTED
        ]
        problems += [f"{name} is not supported yet" for name in NOT_SUPPORTED if name in given]
        try:
            params = cls(**{name: value for name, value in given.items() if name in known})
        except ValueError as error:
            problems.append(str(error).removeprefix("sampling parameters: "))
        if problems:
            raise ValueError("sampling parameters: " + "; ".join(problems))
        return params

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_filters(self) -> bool:
        """Whether tokens are left out of the draw: by top_k, top_p or min_p, or all but the most likely one."""
        return self.is_greedy or self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def needs_penalties(self) -> bool:
        """Whether tokens seen so far change the logits."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar constrains the output."""
        return any(getattr(self, name) is not None for name in GRAMMARS)

    @property
    def draws_alone(self) -> bool:
        """Whether the host has no part in the draws, and no stop condition needs text."""
        shapes_logits = self.needs_penalties or bool(self.logit_bias) or self.min_new_tokens > 0 or self.is_constrained
        return not shapes_logits and not self.needs_text and self.max_new_tokens > 0

    @property
    def needs_text(self) -> bool:
        """Whether the end of the request depends on text, so that a tokenizer is needed."""
        return bool(self.stop or self.stop_regex)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens of `stop_token_ids`, in which a token is found at once however many they are."""
        return frozenset(self.stop_token_ids)

    @property
    def stop_patterns(self) -> tuple[Pattern, ...]:
        """The compiled patterns of `stop_regex`."""
        patterns: tuple[Pattern, ...] = self._patterns  # type: ignore[attr-defined]  # set once, see above
        return patterns

    def _compile_patterns(self) -> list[str]:
        """Compile the patterns of `stop_regex`, unless their repeats are too many; return what is wrong with them."""
        object.__setattr__(self, "_patterns", ())
        if not self.stop_regex or not _RULES["stop_regex"][0](self.stop_regex):
            return []
        if (size := sum(map(pattern_size, self.stop_regex))) > MAX_PATTERN_SIZE:
            return [
                f"stop_regex: with their repeats written out, the patterns have {size} characters, at most "
                f"{MAX_PATTERN_SIZE} are compiled"
            ]
        patterns, broken = [], []
        for pattern in self.stop_regex:
            try:
                patterns.append(regex.compile(pattern))
                if patterns[-1].match("", timeout=MAX_MATCH_S):
                    broken.append(f"stop_regex {pattern!r}: matches the empty text")
            except (regex.error, RecursionError, OverflowError, TimeoutError) as error:
                broken.append(f"stop_regex {pattern!r}: {error}")
        object.__setattr__(self, "_patterns", tuple(patterns))
        return broken


def _strings(value: object) -> object:
    return (value,) if isinstance(value, str) else _listed(value)


def _listed(value: object) -> object:
    """Convert None to () and a list, tuple or set to a tuple; return other values unchanged (and refused later)."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else value


def _integer_keys(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {int(k) if isinstance(k, str) and k.isascii() and k.isdigit() else k: v for k, v in value.items()}


def _json_text(value: object) -> object:
    """Convert a JSON object to its text; return other values unchanged."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value


def _is_int(value: object, low: int, high: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    # NaN fails both comparisons, infinity the last test; an integer beyond the floats would fail where it is used.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and low <= value <= high
        and value <= sys.float_info.max
        and (value >= -sys.float_info.max or value == -math.inf)
    )


def _is_texts(value: object, max_bytes: float = math.inf) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_STOPS
        and all(isinstance(text, str) and 0 < _num_bytes(text) <= max_bytes for text in value)
    )


def _num_bytes(text: str) -> int:
    """Return the length in UTF-8; 0 for a text that has none, with half of a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def _is_bias(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, Mapping) and all(_is_int(k, 0) and _is_number(v, -math.inf) for k, v in value.items())


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_int(token_id, 0) for token_id in value)


def _is_grammar(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "")


_BOOL = (_is_bool, "true or false")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda v: _is_int(v, 0), "an integer of 0 or more"),
    "stop": (_is_texts, f"a non-empty string or a list of at most {MAX_STOPS}, of whole characters"),
    "stop_token_ids": (_is_ids, "a list of token ids of 0 or more"),
    "stop_regex": (
        lambda v: _is_texts(v, MAX_STOP_REGEX_BYTES),
        f"a pattern of 1 to {MAX_STOP_REGEX_BYTES} bytes or a list of at most {MAX_STOPS}, of whole characters",
    ),
    "temperature": (lambda v: _is_number(v, 0, MOST_TEMPERATURE), f"a number in [0, {MOST_TEMPERATURE:g}]"),
    "top_p": (lambda v: _is_number(v, 0, 1) and v > 0, "a number in (0, 1]"),
    "top_k": (lambda v: _is_int(v, -1) and v != 0, "-1 or an integer of 1 or more"),
    "min_p": (lambda v: _is_number(v, 0, 1), "a number in [0, 1]"),
    "frequency_penalty": (lambda v: _is_number(v, -2, 2), "a number in [-2, 2]"),
    "presence_penalty": (lambda v: _is_number(v, -2, 2), "a number in [-2, 2]"),
    "repetition_penalty": (
        lambda v: _is_number(v, LEAST_REPETITION_PENALTY, 2),
        f"a number in [{LEAST_REPETITION_PENALTY:g}, 2]",
    ),
    "min_new_tokens": (lambda v: _is_int(v, 0), "an integer of 0 or more"),
    "n": (lambda v: _is_int(v, 1, MAX_SAMPLES), f"an integer from 1 to {MAX_SAMPLES}"),
    "ignore_eos": _BOOL,
    "skip_special_tokens": _BOOL,
    "kept_special_tokens": (
        lambda v: _is_ids(v) and len(v) <= MAX_KEPT_SPECIAL,
        f"a list of at most {MAX_KEPT_SPECIAL} token ids of 0 or more",
    ),
    "spaces_between_special_tokens": _BOOL,
    "no_stop_trim": _BOOL,
    "stream_interval": (lambda v: v is None or _is_int(v, 1), "an integer of 1 or more"),
    "logit_bias": (_is_bias, "an object of token ids and numbers"),
    "sampling_seed": (lambda v: v is None or _is_int(v, -(2**63), 2**63 - 1), "a 64-bit integer"),
    "custom_params": (lambda v: v is None or isinstance(v, Mapping), "an object"),
    "json_schema": (_is_grammar, "a JSON schema, as text or as an object"),
    "regex": (_is_grammar, "a pattern"),
    "ebnf": (_is_grammar, "a grammar in EBNF"),
    "structural_tag": (_is_grammar, "a structural tag, as JSON text or as an object"),
    "jump_forward": (lambda v: v is None or v in ("text", "exact", "off"), '"text", "exact" or "off"'),
}
