"""A test of the engine on all Triton kernels at once: on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import json

import pytest

from lockstep.tests.support.triton.programs import run_on_triton

pytest.importorskip("triton")

PROGRAM = """
import collections, json
from lockstep.kernels.attention import triton_kernels as attention
from lockstep.kernels.layers import triton_rms_norm
from lockstep.kernels.recurrent import triton_kernels as recurrent
from lockstep.kernels.linear import triton_grouped, triton_kernels as linear
from lockstep.kernels.sampling import triton_draws, triton_logprobs
from lockstep.tests.rollout import test_invariance_table as table
from lockstep.tests.rollout.model.own_attention.test_families import make
from lockstep.tests.support.random_models import FAMILIES, random_model

calls = collections.Counter()

def count(module, name):
    function = getattr(module, name)
    def counted(*args, **kwargs):
        calls[f"{'.'.join(module.__name__.split('.')[-2:])}.{name}"] += 1
        return function(*args, **kwargs)
    setattr(module, name, counted)

for module, name in ((attention, "triton_attention"), (linear, "product"), (triton_rms_norm, "forward"),
                     (triton_grouped, "routed_sum"), (triton_logprobs, "selected"), (triton_logprobs, "scaled"),
                     (triton_draws, "draw"), (recurrent, "gated_delta_rule"), (recurrent, "gated_delta_rule_in_slots")):
    count(module, name)
dtype, family = getattr(torch, sys.argv[1]), sys.argv[2]
kinds = {  # of the layer, one where nothing else is said
    "inkling": {"layer_types": ["hybrid_sliding"], "mlp_layer_types": ["sparse"]},
    "inkling2": {"layer_types": ["hybrid"]},
    "deepseek_v4": {"layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"]},
    "zamba": {"num_hidden_layers": 2, "layers_block_type": ["hybrid"] * 2},  # which share a block
    "dots3_note_text": {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"], "per_layer_config": {}},
    "minimax": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "zaya": {"layer_types": ["hybrid"]},
}
if family in FAMILIES:
    model = random_model(family, dtype, **{"num_hidden_layers": 1, **kinds.get(family, {})}).to(device)
else:
    model = make(family, dtype).to(device)
prompts = [[5], table.STEM[:33], [*table.STEM[:20], 9, 8]]
settings = [table.params(i, 4) for i in range(3)]
engine = table.make_engine(model, kv_cache="32 blocks", max_num_seqs=4, chunked_prefill_size=17)
guarantee = engine.model.numerics.guarantee
options = table.RequestOptions(logprob_start_len=0)
missed, together = (engine.generate(prompts, settings) for _ in range(2))  # the second time a hit
assert [(c.token_ids, c.logprobs) for c in missed] == [(c.token_ids, c.logprobs) for c in together]
assert all(c.num_cached_tokens > 0 for c in together[1:])
table.assert_trainers_bits(engine, together)
engine.close()
alone = table.make_engine(model, kv_cache="32 blocks", max_num_seqs=4, prefix_cache=False)
for prompt, params, completion in zip(prompts, settings, together):
    [single] = alone.generate([prompt], [params], options=options)
    assert single.token_ids == completion.token_ids and single.logprobs == completion.logprobs
    table.assert_trainers_bits(alone, [single])
print(json.dumps({"linear": guarantee.linear, "attention": guarantee.attention, "calls": calls}))
"""


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        pytest.param("bfloat16", "qwen3", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "qwen3_moe", marks=pytest.mark.slow),
        pytest.param("float32", "gpt_oss", marks=pytest.mark.exhaustive),
        pytest.param("float32", "qwen3", marks=pytest.mark.exhaustive),
        pytest.param("float32", "gemma2", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "gemma3", marks=pytest.mark.exhaustive),
        pytest.param("float32", "glm_moe_dsa", marks=pytest.mark.exhaustive),
        pytest.param("float32", "inkling", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "inkling2", marks=pytest.mark.exhaustive),
        pytest.param("float32", "deepseek_v4", marks=pytest.mark.exhaustive),
        pytest.param("float32", "mamba", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "zamba", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "dots3_note_text", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "minimax", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "zaya", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "gptj", marks=pytest.mark.exhaustive),
        pytest.param("float32", "bloom", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "falcon", marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_on_all_triton_kernels_at_once_keeps_the_trainers_bits(dtype, family):
    report = json.loads(run_on_triton(PROGRAM, dtype, family))
    assert (report["linear"], report["attention"]) == ("triton", "triton")
    has_experts = family not in (
        "qwen3",
        "gemma2",
        "gemma3",
        "glm_moe_dsa",
        "mamba",
        "zamba",
        "gptj",
        "bloom",
        "falcon",
    )
    assert ("linear.triton_grouped.routed_sum" in report["calls"]) == has_experts
    scans = {"recurrent.triton_kernels.gated_delta_rule", "recurrent.triton_kernels.gated_delta_rule_in_slots"}
    assert scans.isdisjoint(report["calls"]) == (family not in ("mamba", "zamba", "minimax"))
    expected = {"attention.triton_kernels.triton_attention", "linear.triton_kernels.product"}
    expected |= {"sampling.triton_logprobs.selected", "sampling.triton_draws.draw"}
    expected |= set() if family in ("gptj", "bloom", "falcon") else {"layers.triton_rms_norm.forward"}
    assert expected <= report["calls"].keys()
