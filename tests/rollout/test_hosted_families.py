"""Rollouts of every promised family against transformers: same greedy tokens, same log-probabilities."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.covering import covering

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v32",
    "glm_moe_dsa",
    "dots3_note_text",
    "llama4",
]
PROMPTS = [[3, 17, 90, 4, 55], [7] * 3 + list(range(40, 75)), [250]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(make_model, family):
    model = make_model(family, attn_implementation="eager")
    engine = Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=13))
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0.0))
    assert model.config._attn_implementation == "eager"
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()
        with torch.no_grad():
            logits = model(expected[:, :-1]).logits[0, len(prompt) - 1 :]
        logprobs = torch.log_softmax(logits, -1).gather(-1, expected[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, atol=2e-5, rtol=1e-4)


@covering(1, rest="slow", dtype=[torch.float32, torch.bfloat16], family=FAMILIES)
def test_sampled_logprobs_are_the_trainers_bit_for_bit(make_model, family, dtype):
    model = make_model(family, dtype).train()
    engine = Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=13))
    params = SamplingParams(max_new_tokens=12, temperature=0.7, sampling_seed=5)
    for completion in engine.generate(PROMPTS, params):
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with engine.model.training_numerics():
            logits = model(ids, use_cache=False).logits[0, completion.num_prompt_tokens - 1 : -1]
        assert logits.requires_grad
        chosen = selected_logprobs(logits, torch.tensor(completion.token_ids), 0.7)
        assert list(completion.logprobs) == chosen.tolist()
