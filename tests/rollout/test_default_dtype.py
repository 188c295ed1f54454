"""Engines under another default dtype of torch's: a trainer sets it, and transformers does while it loads a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

PROMPTS = [[1, 2, 3], [4] * 20] * 3
SETTINGS = [
    {},
    {"frequency_penalty": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"logit_bias": {5: 1.0}},
    {"temperature": 0.0},
]


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def drawn(engine: Engine) -> list[tuple[object, ...]]:
    found = []
    for settings in SETTINGS:
        params = SamplingParams(**{"max_new_tokens": 14, "temperature": 0.7, "sampling_seed": 1, **settings})
        found += [(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, params)]
    return found


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1", "qwen3_5", "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_logprobs_do_not_depend_on_torchs_default_dtype(make_model, family, dtype, other_default):
    model = make_model(family, dtype)
    config = EngineConfig(kv_cache="64 blocks", max_num_seqs=8)
    first = Engine(model, config)
    expected = drawn(first)
    torch.set_default_dtype(other_default)
    assert drawn(first) == expected
    first.close()
    engine = Engine(model, config)
    assert drawn(engine) == expected
    token_ids, logprobs = expected[0]
    ids = torch.tensor([[*PROMPTS[0], *token_ids]])
    with engine.model.training_numerics():
        logits = model(ids, use_cache=False).logits[0, len(PROMPTS[0]) - 1 : -1]
        chosen = selected_logprobs(logits, torch.tensor(token_ids), 0.7)
    assert tuple(chosen.tolist()) == logprobs
    chosen.sum().backward()
