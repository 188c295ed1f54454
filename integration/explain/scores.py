"""Log-probabilities of tokens that another engine reports, in its answer's JSON, beside those of a recording.

The shapes: SGLang's `/generate`, vLLM's `/inference/v1/generate`, completions and chat completions with
`return_token_ids`, and lines of `lockstep generate` or of a run's samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .comparison import ulps_between
from .recording import Recording
from .sequence import TokenSequence

_TOKEN_ID = "token_id:"  # begin of a token's text with vLLM's `return_tokens_as_token_ids`


@dataclass(frozen=True)
class Scores:
    """Reported log-probabilities."""

    token_ids: tuple[int, ...]  # the output
    logprobs: tuple[float, ...]  # one a token
    prompt_ids: tuple[int, ...] = ()  # if the answer has them


@dataclass(frozen=True)
class TokenGap:
    """One token's log-probability here and as it was reported."""

    position: int
    token_id: int
    own: float
    reported: float
    ulps: int  # of float32

    @property
    def difference(self) -> float:
        """Return how much larger the reported one is."""
        return self.reported - self.own


def read_scores(path: Path, choice: int = 0) -> Scores:
    """Read an answer. choice: number of the answer in a list, or of the choice in an answer. Raises ValueError that
    says what is missing."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip()[:1] == "[" or text.count("\n{") == 0 else _lines(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    return scores_of(found, choice, str(path))


def scores_of(found: Any, choice: int, source: str) -> Scores:
    """Return the scores of an answer's JSON."""
    try:
        answer, its = _chosen(found, choice)
        scores = _sglang(its) or _vllm(answer, its) or _plain(its)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{source}: choice {choice} has another shape: {type(error).__name__}: {error}") from error
    if scores is None:
        raise ValueError(
            f"{source} has no log-probabilities of tokens with their ids: meta_info.output_token_logprobs (SGLang, "
            "return_logprob), choices[].logprobs (vLLM, logprobs=0 and return_token_ids), or token_ids and logprobs"
        )
    if not all(type(one) in (int, float) for one in scores.logprobs):
        raise ValueError(f"{source}: log-probabilities must be numbers")
    if len(scores.token_ids) != len(scores.logprobs) or not scores.token_ids:
        raise ValueError(f"{source}: {len(scores.logprobs)} log-probabilities of {len(scores.token_ids)} tokens")
    return scores


def gaps(recording: Recording, sequence: TokenSequence, scores: Scores) -> list[TokenGap]:
    """Return the gap of every reported token. Raises ValueError if the tokens, or those of the prompt, are others than
    the sequence's."""
    if scores.prompt_ids and scores.prompt_ids != sequence.prompt_ids:
        raise ValueError(
            f"the scores are behind another prompt, of {len(scores.prompt_ids)} tokens; that of the sequence has "
            f"{len(sequence.prompt_ids)}"
        )
    for index, (known, its) in enumerate(zip(sequence.token_ids, scores.token_ids, strict=False)):
        if known != its:
            raise ValueError(f"the scores are of other tokens: output token {index} is {its}, in the sequence {known}")
    first = len(sequence.prompt_ids)
    found = []
    for index, (token, logprob) in enumerate(zip(scores.token_ids, scores.logprobs, strict=True)):
        if (own := recording.logprobs.get(first + index)) is not None:
            pair = torch.tensor([own, logprob], dtype=torch.float32)
            found.append(TokenGap(first + index, token, own, logprob, int(ulps_between(pair[:1], pair[1:]))))
    return found


def _lines(text: str) -> list[Any]:
    # Not splitlines: servers write U+2028 and its like as they are, and these end no line of JSON.
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _chosen(found: Any, choice: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the answer, and the choice in it, or the answer again."""
    if isinstance(found, list):
        found = found[choice]
        choice = 0
    if isinstance(found.get("choices"), list):
        return found, found["choices"][choice]
    if choice:
        raise ValueError("there is one answer only")
    return found, found


def _sglang(answer: Mapping[str, Any]) -> Scores | None:
    meta = answer.get("meta_info") or {}
    if not (triples := meta.get("output_token_logprobs")):
        return None
    prompt = meta.get("input_token_logprobs") or []
    # With logprob_start_len=0 the prompt's are all there; its first token has no log-probability.
    is_whole = bool(prompt) and prompt[0][0] is None
    prompt_ids = answer.get("prompt_token_ids") or meta.get("prompt_token_ids") or []
    return Scores(
        tuple(int(triple[1]) for triple in triples), tuple(float(triple[0]) for triple in triples),
        tuple(prompt_ids) or (tuple(int(triple[1]) for triple in prompt) if is_whole else ()),
    )  # fmt: skip


def _vllm(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> Scores | None:
    """Read vLLM's three forms: tokens, chat (`content`), completions (`token_logprobs`)."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        return None
    prompt_ids = tuple(answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or ())
    content = logprobs.get("content")
    values = logprobs.get("token_logprobs") if content is None else [entry["logprob"] for entry in content]
    if values is None:
        return None
    token_ids: Sequence[int] | None = choice.get("token_ids")
    if token_ids is None and content is not None and all("token_id" in entry for entry in content):
        token_ids = [entry["token_id"] for entry in content]
    if token_ids is None:
        texts = logprobs["tokens"] if content is None else [entry["token"] for entry in content]
        if not all(text.startswith(_TOKEN_ID) for text in texts):
            return None
        token_ids = [int(text.removeprefix(_TOKEN_ID)) for text in texts]
    return Scores(tuple(token_ids), tuple(float(value) for value in values), prompt_ids)


def _plain(answer: Mapping[str, Any]) -> Scores | None:
    token_ids = answer.get("token_ids") or answer.get("output_ids")
    if not token_ids or not isinstance(answer.get("logprobs"), list):
        return None
    return Scores(tuple(token_ids), tuple(map(float, answer["logprobs"])), tuple(answer.get("prompt_ids") or ()))
