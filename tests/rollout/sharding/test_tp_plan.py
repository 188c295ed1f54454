"""The plan of a division: roles from a module's own plan, shards of its tensors, and refused models."""

from __future__ import annotations

import pytest
import torch
import transformers

from lockstep.kernels.self_test import Cut
from lockstep.rollout.sharding.pp_cut import PassedLayer, cut_stage, stage_layers, stage_problems
from lockstep.rollout.sharding.shards import Shard
from lockstep.rollout.sharding.tp_plan import layer_cuts, plan_shards, roles_of


@pytest.fixture
def meta_model(make_model):
    def make(family: str, **overrides: object) -> transformers.PreTrainedModel:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(make_model(family, **overrides).config)

    return make


def ranges_of(model, name: str, tp: int, k_blocks: int = 4) -> list[tuple[tuple[int, int], ...]]:
    return [plan_shards(model, roles_of(model), tp, rank, k_blocks)[name].ranges for rank in range(tp)]


def test_a_shards_shape_is_that_of_its_ranges():
    shard = Shard(full_shape=(8, 4), dim=0, ranges=((2, 4), (6, 8)))
    assert shard.shape == (4, 4) and not shard.is_whole
    assert Shard.whole((8, 4)).is_whole and Shard.whole(()).is_whole and Shard.whole(()).shape == ()


def test_few_kv_heads_stand_on_several_ranks(meta_model):
    model = meta_model("llama")  # 4 query heads and 2 KV heads of 32
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert ranges_of(model, name.format("q"), 4) == [((0, 32),), ((32, 64),), ((64, 96),), ((96, 128),)]
    assert ranges_of(model, name.format("k"), 4) == [((0, 32),), ((0, 32),), ((32, 64),), ((32, 64),)]
    assert ranges_of(model, name.format("v"), 2) == [((0, 32),), ((32, 64),)]


def test_packed_gate_and_up_are_cut_each(meta_model):
    experts = "model.layers.0.mlp.experts."
    halves = [((0, 16), (32, 48)), ((16, 32), (48, 64))]
    assert ranges_of(meta_model("qwen3_moe"), experts + "gate_up_proj", 2) == halves
    if hasattr(transformers, "Inkling2TextConfig"):  # whose own plan takes them for interleaved ones
        found = ranges_of(meta_model("inkling2"), experts + "gate_up_proj", 2)
        assert found == [((0, 48), (96, 144)), ((48, 96), (144, 192))]
    interleaved = meta_model("gpt_oss")  # [experts, in, 2 * 96], gate and up interleaved
    assert ranges_of(interleaved, experts + "gate_up_proj", 2) == [((0, 96),), ((96, 192),)]
    assert ranges_of(interleaved, experts + "down_proj_bias", 2) == [((0, 4),)] * 2
    assert ranges_of(interleaved, "model.layers.0.self_attn.sinks", 4) == [((i, i + 1),) for i in range(4)]


def test_a_vocabulary_that_does_not_divide_stands_whole_on_every_rank(meta_model):
    model = meta_model("qwen3", vocab_size=255)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert ranges_of(model, name, 2) == [((0, 255),)] * 2


def test_everything_that_does_not_divide_is_named_at_once(meta_model):
    model = meta_model("qwen2", num_attention_heads=6, num_key_value_heads=3, intermediate_size=90)
    with pytest.raises(ValueError, match="cannot be divided") as caught:
        plan_shards(model, roles_of(model), 4, 0, 4)
    offenders = ("num_attention_heads=6", "mlp.gate_proj.weight [90, 64]", "k_proj.weight [96, 64]", "k_proj.bias [96]")
    assert all(offender in str(caught.value) for offender in offenders)
    with pytest.raises(ValueError, match=r"down_proj.weight has 90 inputs, no multiple of k_blocks=4"):
        plan_shards(model, roles_of(model), 1, 0, 4)


def test_a_style_that_is_not_known_and_a_family_without_a_plan_are_named(meta_model):
    model = meta_model("llama")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": "colwise_backwards"}
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj has the plan style 'colwise_backwards'"):
        plan_shards(model, roles_of(model), 2, 0, 2)
    with torch.device("meta"):
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=64))
    with pytest.raises(ValueError, match="GPT2LMHeadModel brings no tensor-parallel plan"):
        plan_shards(gpt2, roles_of(gpt2), 2, 0, 2)


def test_heads_are_those_of_each_layer(meta_model):
    model = meta_model("dots3_note_text")  # 4 heads, and 2 in the layer with a window
    assert plan_shards(model, roles_of(model), 2, 0, 2)["model.layers.1.self_attn.g_proj.weight"].ranges == ((0, 1),)
    with pytest.raises(ValueError, match=r"num_attention_heads=2 does not divide by tp=4"):
        plan_shards(model, roles_of(model), 4, 0, 4)


def test_the_self_test_hears_of_every_cut_whatever_the_number_of_ranks(meta_model):
    model = meta_model("qwen3_moe")
    cuts = layer_cuts(model, roles_of(model), 4)
    assert {Cut(64, 32, "blocks", 4), Cut(64, 64, "columns", 4), Cut(64, 128, "blocks", 4)} <= set(cuts)
    assert layer_cuts(model, roles_of(model), 1) == []


def test_stages_have_as_many_layers_as_each_other_or_one_more():
    assert [stage_layers(7, 3, rank) for rank in range(3)] == [range(3), range(3, 5), range(5, 7)]
    with pytest.raises(ValueError, match="pp=4 stages need at least as many layers, and the model has 3"):
        stage_layers(3, 4, 0)


@pytest.mark.parametrize("family", ["falcon_h1", "bamba", "jamba", "mamba2", "mamba"])
def test_a_family_without_a_pipeline_plan_is_named(meta_model, family):
    layers = f"{meta_model(family).base_model_prefix}.layers"
    assert f"brings no pipeline plan (base_model_pp_plan) with {layers}" in stage_problems(meta_model(family))[0]
    assert stage_problems(meta_model("nemotron_h")) == []


def test_a_stage_has_its_own_tensors_only_and_a_tied_head_keeps_the_embedding(meta_model):
    first, last = meta_model("qwen2"), meta_model("qwen2")  # tied
    assert stage_problems(first) == [] and cut_stage(first, range(1), is_first=True, is_last=False) is None
    stand_in = cut_stage(last, range(1, 2), is_first=False, is_last=True)
    assert isinstance(stand_in, PassedLayer) and last.model.layers[0] is stand_in
    names = [{name for name, _ in model.named_parameters()} for model in (first, last)]
    assert "model.embed_tokens.weight" in names[0] & names[1] and "model.norm.weight" in names[1] - names[0]
    assert not any("layers.1" in name for name in names[0]) and not any("layers.0" in name for name in names[1])
