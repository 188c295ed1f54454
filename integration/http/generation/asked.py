"""A request for completions as the engine gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....rollout.request_options import RequestOptions
from ....rollout.sampling_params import SamplingParams


@dataclass(frozen=True)
class Asked:
    """The engine's part of one HTTP request; each of the four lists has one entry per prompt."""

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    options: Sequence[RequestOptions]
    rids: Sequence[str]
    names_weights: bool = False  # the tokens' weights must have a digest, as for a receipt
    grammar_field: str | None = None  # of the request, that its grammars are made of; None: the kind of grammar
