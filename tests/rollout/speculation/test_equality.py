"""Outputs with drafts equal those without, bit for bit, whoever proposes, in every family and way to run steps."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.speculation.conftest import VOCAB
from lockstep.tests.rollout.speculation.drafting import Case, Oracle, counts, draft_always, outputs_of, play
from lockstep.tests.support.covering import covering, covering_rows

WAYS: dict[str, dict[str, object]] = {
    "plain": {"cuda_graph_batch_sizes": ()}, "overlap": {"overlap": True},
    "ahead": {"overlap": True, "cuda_graph_batch_sizes": (1, 2, 4, 8, 16, 32, 64)},
    "recorded": {"cuda_graph_batch_sizes": (2, 4, 8, 16, 32, 64)}, "2 stages": {"stages": 2},
}  # fmt: skip
FAMILIES = ("qwen3", "mistral", "qwen3_moe", "qwen3_5", "lfm2")
MAMBA = ("jamba", "mamba2", "mamba", "zamba", "zamba2", "minimax", "zaya")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "città": {"enum": ["Paris", "Parma", "Rome"]}},
    "required": ["name", "città"],
    "additionalProperties": False,
}
STEM = [(11 * i + 3) % 900 for i in range(20)]
PROMPTS = ([3, 17, 90, 4, 55], [*STEM, 7, 8], [250], [*STEM, 9])
ALL = RequestOptions(top_logprobs_num=3, token_ids_logprob=(5, 1000))
# What the device draws alone, and what the host takes part in.
SIMPLE: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0}, "sampled": {}, "cold": {"temperature": 0.4},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
}  # fmt: skip
SHAPED: dict[str, dict[str, object]] = {
    "filters": {"top_k": 20, "top_p": 0.95, "temperature": 0.8},
    "penalties": {"temperature": 0.3, "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    "min_new_tokens": {"min_new_tokens": 9, "logit_bias": {0: 9.0}, "temperature": 0.7},
    "logit_bias": {"logit_bias": {5: 6.0, 9: float("-inf")}},
    **{f"json {mode}": {"json_schema": PERSON, "jump_forward": mode} for mode in ("text", "exact", "off")},
    "regex": {"regex": "(ab|[0-9]{2,5})( value){0,9}", "jump_forward": "text"},
}


def cases(settings: dict[str, dict[str, object]], num_new: int, options: RequestOptions) -> list[Case]:
    return [
        Case(PROMPTS[seed % len(PROMPTS)], SamplingParams(max_new_tokens=num_new, sampling_seed=seed, **its), options)
        for seed, its in enumerate(settings.values())
    ]


GROUPS = (cases(SIMPLE, 16, RequestOptions()), cases(SHAPED, 16, ALL))


@pytest.fixture
def expected(small, make_engine):
    """Return a function of family and dtype: the records of both groups in an engine without drafts."""

    def records(family: str, dtype: torch.dtype) -> list[dict[str, tuple]]:
        if (family, dtype) not in _found:
            engine = make_engine(small(family, dtype), speculation="off")
            _found[family, dtype] = [play(engine, group) for group in GROUPS]
            engine.close()
        return _found[family, dtype]

    return records


_found: dict[tuple[str, torch.dtype], list[dict[str, tuple]]] = {}


# Each value in the quick suite, each pair in the slow one, the product in the exhaustive one.
AXES = {
    "family": FAMILIES, "dtype": [torch.float32, torch.bfloat16], "way": [*WAYS],
    "spoil": ["right", "part", "wrong", "too long", "outside"],
}  # fmt: skip


@covering(1, rest="exhaustive", **AXES)
def test_drafts_change_no_bit(small, make_engine, expected, family, dtype, way, spoil):
    compare(expected(family, dtype), make_engine(small(family, dtype), **WAYS[way]), spoil)


@pytest.mark.slow
@pytest.mark.parametrize(
    tuple(AXES),
    [
        tuple(values[place] for values, place in zip(AXES.values(), row, strict=True))
        for row in sorted(covering_rows(2, [len(values) for values in AXES.values()]))
    ],
)
def test_drafts_change_no_bit_in_any_pair(small, make_engine, expected, family, dtype, way, spoil):
    compare(expected(family, dtype), make_engine(small(family, dtype), **WAYS[way]), spoil)


# What the stand-in for stages in one process cannot run.
@pytest.mark.slow
@covering(
    1, family=["gemma3", "gpt_oss", "nemotron_h", "falcon_h1", "kimi_linear", "qwen3_next", *MAMBA],
    dtype=[torch.float32, torch.bfloat16], way=[way for way in WAYS if way != "2 stages"], spoil=["right", "part"],
)  # fmt: skip
def test_drafts_change_no_bit_of_further_families(small, make_engine, expected, family, dtype, way, spoil):
    compare(expected(family, dtype), make_engine(small(family, dtype), **WAYS[way]), spoil)


def compare(wanted: list[dict[str, tuple]], engine: Engine, spoil: str) -> None:
    """Run both groups with an oracle that knows their records, and compare."""
    oracle = Oracle({}, VOCAB, spoil)
    draft_always(engine, oracle)
    for group, records in zip(GROUPS, wanted, strict=True):
        oracle.outputs = outputs_of(records)
        before = counts(engine)
        assert play(engine, group) == records
        drafted, accepted, refused = (now - then for now, then in zip(counts(engine), before, strict=True))
        if spoil == "wrong":
            assert drafted > 30 and accepted <= 3  # of a few tokens that all settings make likely
        else:
            assert accepted > 12
        assert (refused > 0) == (spoil in ("too long", "outside"))
    engine.close()
