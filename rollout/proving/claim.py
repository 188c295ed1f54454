"""The claim of a receipt in the form that a proof reads, and the answer of a proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ..receipt import FORMAT, LISTS, digest_of, is_in_full, settings_of
from ..sampling_params import SamplingParams
from .fields import wrong_fields


@dataclass(frozen=True)
class KeptRows:
    """Rows of a sequence, up to number `end` - 1, whose KV older weights have computed."""

    digest: str | None
    end: int


@dataclass(frozen=True)
class ClaimedSpan:
    """Output tokens start .. end-1, drawn from one version of the weights over KV of the same origin."""

    version: str
    digest: str | None
    start: int
    end: int
    kept: tuple[KeptRows, ...] = ()  # KV of older weights, from row 0 on; the rows after it are of `digest`


@dataclass(frozen=True, eq=False)
class Claim:
    """All of a receipt that a proof needs. Raises ValueError, naming what is wrong, where a receipt is not one."""

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray  # int64 [T]
    logprob_bits: np.ndarray  # uint32 [T]: of the float32 log-probabilities
    seed: int
    index: int
    params: SamplingParams
    spans: tuple[ClaimedSpan, ...]
    finish: Mapping[str, Any]  # type, the stop token or string that matched, and the message of a full pool
    eos: frozenset[int]
    max_model_len: int
    grammar: Mapping[str, Any] | None = None
    images: str | None = None  # SHA-256 of the prompt's, if it has some

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def draws(self) -> tuple[ClaimedSpan, ...]:
        """Its spans; neighbours of equal weights, over KV of equal origin, as one: each has to be drawn as a whole."""
        found: list[ClaimedSpan] = []
        for span in self.spans:
            if found and (found[-1].digest, found[-1].kept) == (span.digest, span.kept):
                found[-1] = replace(found[-1], end=span.end)
            else:
                found.append(span)
        return tuple(found)

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end the output."""
        return self.params.stop_ids | (frozenset() if self.params.ignore_eos else self.eos)

    @property
    def wrong_end(self) -> int | None:
        """The position of an output token that cannot stand where it does, for an end before it or none after it."""
        if self.finish["type"] == "ignored":  # no step took it, and its prompt may be longer than the context
            return 0 if len(self.token_ids) else None
        stops = np.isin(self.token_ids, list(self.stops))
        if len(early := np.flatnonzero(stops[:-1])):
            return int(early[0]) + 1
        if len(stops) > self.most_tokens:
            return max(self.most_tokens, 0)
        return max(len(stops) - 1, 0) if self._is_wrong_finish(bool(len(stops) and stops[-1])) else None

    def _is_wrong_finish(self, ends_with_stop: bool) -> bool:
        """Return whether no engine ends this output so. ends_with_stop: whether its last token is a stop token."""
        kind, matched, params = self.finish["type"], self.finish.get("matched"), self.params
        if kind == "abort":  # where filters keep more tokens than may be reported, it comes before a stop
            return ends_with_stop and not params.has_filters
        if kind == "length":
            return ends_with_stop
        if not len(self.token_ids):
            return True
        if matched is None:
            return not params.is_constrained
        if isinstance(matched, str):
            return matched not in params.stop and not params.stop_regex
        return not ends_with_stop or bool(self.token_ids[-1] != matched)

    @property
    def unproven_end(self) -> str:
        """The reason why the end of the output cannot be told from a cut; "": it can, or is taken as said."""
        num = len(self.token_ids)
        if self.finish["type"] != "length" or num == self.most_tokens or self.finish.get("message"):
            return ""
        return (
            f"it ends by its length after {num} of {self.most_tokens} tokens, and does not say that the pool was full: "
            "it was cut, or an older version made it"
        )

    @property
    def most_tokens(self) -> int:
        """The most output tokens that the settings and the engine's context leave room for."""
        return min(self.params.max_new_tokens, self.max_model_len - self.num_prompt_tokens)

    @property
    def ends_with_context(self) -> bool:
        """Whether the engine's context alone has ended the output by its length."""
        num = self.max_model_len - self.num_prompt_tokens
        return self.finish["type"] == "length" and len(self.token_ids) == num < self.params.max_new_tokens

    @property
    def ends_with_grammar(self) -> bool:
        """Whether it claims that its grammar allows no token after the output."""
        return self.finish["type"] == "stop" and self.finish.get("matched") is None


@dataclass(frozen=True)
class Drawn:
    """A token at a position, as it was claimed or as it comes out."""

    token_id: int
    logprob: float
    bits: int  # of the log-probability, as float32


@dataclass(frozen=True)
class Verdict:
    """The answer of a proof about one sample."""

    status: Literal["equal", "differs", "unproven"]
    what: str = ""  # what differs ("token", "logprob", ...), or why nothing was proven
    position: int | None = None  # of the first output token that differs
    claimed: Drawn | None = None
    found: Drawn | None = None
    num_tokens: int = 0  # output tokens that were drawn again and came out equal


def unproven(why: str) -> Verdict:
    return Verdict("unproven", why)


def claim_of(receipt: Mapping[str, Any], vocab_size: int) -> Claim:
    """Read a receipt. Raises ValueError naming every field that is missing or wrong."""
    if receipt.get("format") != FORMAT:
        raise ValueError(f"format is {receipt.get('format')!r}; this version reads {FORMAT}")
    if not is_in_full(receipt):
        raise ValueError("has digests in the place of tokens: give the file that has the sample too")
    wrong = wrong_fields(receipt)
    wrong += [
        f"{name} holds no token ids below {vocab_size}"
        for name in ("prompt", "output")
        if not all(type(id) is int and 0 <= id < vocab_size for id in receipt[name])
    ]
    output, bits = receipt["output"], receipt["logprobs"]
    if not all(type(one) is int and 0 <= one < 2**32 for one in bits) or len(bits) != len(output):
        wrong.append("logprobs holds no 32 bits for each token of the output")
    if not receipt["prompt"]:
        wrong.append("prompt is empty")
    if wrong:
        raise ValueError("; ".join(wrong))
    try:
        params = settings_of(receipt["settings"])
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"settings are none: {error}") from error
    claim = Claim(
        receipt["id"], tuple(receipt["prompt"]), np.array(output, np.int64), np.array(bits, np.uint32), receipt["seed"],
        receipt["index"], params, tuple(map(_span, receipt["spans"])), receipt["finish"], frozenset(receipt["eos"]),
        receipt["max_model_len"], receipt.get("grammar"), receipt.get("images"),
    )  # fmt: skip
    _check_spans(claim)
    return claim


def with_values(receipt: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a receipt with the tokens and log-probabilities of a file in the place of their digests.

    Raises ValueError naming the lists that are not those that the receipt was made of.
    """
    wrong = [name for name in LISTS if not _matches(receipt.get(name), values[name])]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: the file has others than the receipt was made of")
    return {**receipt, **{name: list(values[name]) for name in LISTS}}


def _matches(claimed: object, values: Any) -> bool:
    return claimed in (list(values), digest_of(values))


def _span(span: Mapping[str, Any]) -> ClaimedSpan:
    kept = tuple(KeptRows(run["digest"], run["end"]) for run in span["kept_kv"])
    return ClaimedSpan(span["version"], span["digest"], span["start"], span["end"], kept)


def _check_spans(claim: Claim) -> None:
    """Check that the spans cover the output, each with the origin of all KV before it. Raises ValueError."""
    end = 0
    for span in claim.spans:
        rows = [0, *(run.end for run in span.kept), claim.num_prompt_tokens + span.start]
        is_ascending = all(a < b for a, b in pairwise(rows))
        if span.start != end or span.end <= span.start or not is_ascending:
            raise ValueError(f"spans do not cover the output one after another: {span}")
        end = span.end
    if end != len(claim.token_ids):
        raise ValueError(f"spans cover {end} of {len(claim.token_ids)} output tokens")
