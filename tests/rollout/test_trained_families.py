"""Families whose layers differ from Llama's in one thing each: what they compute is hosted, bit for bit.

Partial rotary, rotary tables in float32, shared KV layers, gates between linear layers, products of their own, experts
inside a composite model.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.random_models import spread_weights

SIZES = {
    "vocab_size": 250, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
SHARED_KV = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "sliding_window": 20, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 250,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 250, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
DBRX = {
    "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 250, "resid_pdrop": 0.0,
    "emb_pdrop": 0.0, "attn_config": {"kv_n_heads": 2, "attn_pdrop": 0.0, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
}  # fmt: skip
FAMILIES = {  # model type -> settings
    "phi3": {**SIZES, **PARTIAL},
    "glm4_moe": {**SIZES, **MOE, **PARTIAL, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt_neox": {**SIZES, "rotary_pct": 0.25},
    "olmo2": SIZES,
    "gemma4_text": {**SIZES, **SHARED_KV},
    "qwen2_moe": {**SIZES, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "gpt2": GPT2,
    "dbrx": DBRX,
}
QUICK = [("phi3", torch.float32), ("olmo2", torch.bfloat16), ("gemma4_text", torch.float32), ("gpt2", torch.float32),
         ("qwen2_moe", torch.float32)]  # fmt: skip
ALL = [(family, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL]
PROMPTS = [[3, 17, 90, 4, 55], [*range(40, 75)], [249]]


def make(family: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(1)
    config = transformers.CONFIG_MAPPING[family](**FAMILIES[family])
    return spread_weights(transformers.AutoModelForCausalLM.from_config(config).to(dtype)).train()


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_log_probabilities_are_the_trainers_in_every_bit_also_after_a_retract(family, dtype, restore_threads):
    torch.set_num_threads(1)
    model = make(family, dtype)
    engine = Engine(model, EngineConfig(kv_cache="32 blocks", max_num_seqs=4, chunked_prefill_size=13))
    params = SamplingParams(max_new_tokens=8, temperature=0.7, sampling_seed=5)
    completions = engine.generate(PROMPTS, params)
    for completion in completions:
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with engine.model.training_numerics():
            logits = model(ids, use_cache=False).logits[0, completion.num_prompt_tokens - 1 : -1]
        chosen = selected_logprobs(logits, torch.tensor(completion.token_ids), 0.7)
        assert list(completion.logprobs) == chosen.tolist()
    engine.flush_cache()
    for prompt in PROMPTS:
        engine.add(prompt, params)
    answers, num_steps = [], 0
    while engine.has_work:
        if num_steps in (4, 9):  # in the middle of prompts, and of answers
            engine.pause_generation("retract")
            engine.continue_generation()
        answers += engine.step()
        num_steps += 1
    found = {c.prompt_ids: (c.token_ids, c.logprobs) for c in answers}
    assert found == {c.prompt_ids: (c.token_ids, c.logprobs) for c in completions}


def test_experts_inside_a_composite_model_are_ours_and_are_given_back():
    text = {"model_type": "deepseek_v3", **SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 32,
            "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "num_key_value_heads": 4}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CONFIG_MAPPING["kimi_k25"](text_config=text, vision_config=vision)
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    experts = next(part for part in model.modules() if hasattr(part, "has_gate"))
    before = experts.config._experts_implementation, experts.config._attn_implementation
    engine = Engine(model, EngineConfig(kv_cache="16 blocks"))
    with engine.model.training_numerics():
        assert experts.config._experts_implementation == "lockstep"
    assert (experts.config._experts_implementation, experts.config._attn_implementation) == before
