"""The invariance table's GPU column: the cells of test_invariance_table.py, with the model on a GPU.

Rows: batch mates, chunk sizes, prefix hits, plain and recorded steps, overlap, preemption, drafts. Columns: families
and dtypes. The reference is the trainer's forward on the same device. Without a GPU one column runs on the CPU, so that
this code is known to work on the day.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.rollout.completion import Completion
from lockstep.rollout.engine import Engine
from lockstep.rollout.model import numerics
from lockstep.rollout.model.operations import deferred
from lockstep.rollout.running.decode_graphs import why_not_recorded
from lockstep.tests.rollout.test_invariance_table import (
    PROMPTS,
    assert_trainers_bits,
    make_engine,
    params,
)

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAMILIES = ("qwen3", "llama", "gemma2", "olmo2", "gpt_oss", "qwen3_moe", "glm_moe_dsa", "llama4")
WAYS: dict[str, dict[str, object]] = {
    "batch": {"prefix_cache": False}, "plain steps": {"cuda_graph_batch_sizes": ()},
    "chunks of 1": {"chunked_prefill_size": 1, "prefix_cache": False}, "chunks of 7": {"chunked_prefill_size": 7},
    "chunks of 64": {"chunked_prefill_size": 64}, "recorded steps": {"cuda_graph_batch_sizes": (1, 2, 4, 8)},
    "overlap": {"overlap": True}, "overlap, plain steps": {"overlap": True, "cuda_graph_batch_sizes": ()},
    "preemption": {"kv_cache": "24 blocks", "chunked_prefill_size": 50, "admission_ratio": 0, "prefix_cache": False},
    "drafts": {"speculation": {"past": 8, "siblings": 8}},
}  # fmt: skip
NUM_NEW = 24


def answers(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    return engine.generate(prompts, [params(i, NUM_NEW, ignore_eos=True) for i in range(len(prompts))])


def check_column(model: PreTrainedModel, ways: dict[str, dict[str, object]], prompts: list[list[int]]) -> None:
    """Assert that each way to run steps gives the outputs of prompts alone, and the trainer's bits."""
    engine = make_engine(model, prefix_cache=False)
    alone = [engine.generate(p, params(i, NUM_NEW, ignore_eos=True))[0] for i, p in enumerate(prompts)]
    assert_trainers_bits(engine, alone)
    if why_not_recorded(engine.model):
        ways = {way: config for way, config in ways.items() if not config.get("cuda_graph_batch_sizes")}
    engine.close()
    expected = [(c.token_ids, c.logprobs) for c in alone]
    for way, config in ways.items():
        engine = make_engine(model, **config)
        found = answers(engine, prompts)
        assert [(c.token_ids, c.logprobs) for c in found] == expected, way
        if way == "preemption":
            assert sum(c.num_retractions for c in found) >= 1
        if way == "recorded steps":
            hit = answers(engine, prompts)
            assert any(c.num_cached_tokens for c in hit)
            assert [(c.token_ids, c.logprobs) for c in hit] == expected, "prefix hit"
        engine.check_integrity()
        engine.close()


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_run_steps_on_a_gpu_gives_the_trainers_bits(make_model, family: str, dtype: torch.dtype) -> None:
    check_column(make_model(family, dtype, max_position_embeddings=1024).cuda(), WAYS, PROMPTS)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_whose_products_fill_a_gpu_has_the_trainers_bits(make_model, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "vocab_size": 32_768, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    model = make_model("qwen3", dtype, **sizes).cuda()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 600, (40,), generator=generator).tolist()
    prompts = [torch.randint(32_768, (length,), generator=generator).tolist() for length in lengths]
    wide = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache": "2048 blocks"}
    names = ("batch", "chunks of 64", "recorded steps", "overlap")
    check_column(model, {name: wide | WAYS[name] for name in names}, prompts)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_the_columns_own_code_holds_on_a_cpu(make_model, restore_threads, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    model = make_model("qwen3", dtype, max_position_embeddings=1024, num_hidden_layers=1)
    check_column(model, WAYS, [[5], *[prompt[:70] for prompt in PROMPTS[1:]]])


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma2", "olmo_hybrid", "qwen3_moe", "glm_moe_dsa"])
def test_sums_and_norms_that_wait_as_on_a_gpu_change_no_bit(make_model, restore_threads, monkeypatch, family: str):
    torch.set_num_threads(1)
    model = make_model(family, torch.bfloat16)
    expected = answers(make_engine(model), PROMPTS)
    for module in (deferred, numerics):
        monkeypatch.setattr(module, "triton_serves", lambda device: True)
    engine = make_engine(model)
    found = answers(engine, PROMPTS)
    assert [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in expected]
    assert_trainers_bits(engine, found)
