"""The sizes of a job's model by its configuration: the KV of a token is the engine's, also where layers differ."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from lockstep.integration.grpo.planning.model_sizes import kv_bytes_per_token, layer_configs, mlp_width
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.ranks.mesh import MeshPlan
from lockstep.rollout.sharding.skeleton import auto_class
from lockstep.tests.families.configs import tiny_config

ONE = MeshPlan(1, 1, 1)
# Layers that differ in their heads, latent attention, few layers with attention, own names of heads.
TYPES = ("qwen3", "gemma4_text", "dots3_note_text", "deepseek_v3", "lfm2", "nemotron_h", "jamba", "gptj", "bloom")


def without_memory(kind: str):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    with torch.device("meta"):
        return auto_class(tiny_config(kind)).from_config(tiny_config(kind))


@pytest.mark.parametrize("kind", TYPES)
def test_the_kv_of_a_token_is_what_the_engine_allocates(kind):
    model = without_memory(kind)
    hosted = HostedModel.adopt(
        auto_class(model.config).from_config(tiny_config(kind)).eval(), dtype=None, device=None, invariant=True,
        k_blocks=1,
    )  # fmt: skip
    own = sum(s.num_bytes - s.index_dim * s.index_dtype.itemsize for s in hosted.kv_shapes)
    assert kv_bytes_per_token(model, ONE, hosted.dtype.itemsize) == own


@pytest.mark.parametrize("kind", [*TYPES, "mamba", "qwen3_5_moe_text", "gemma3n_text", "mpt", "falcon", "solar_open"])
def test_every_layer_of_every_family_has_a_width(kind):
    model = without_memory(kind)
    configs = layer_configs(model.config.get_text_config(decoder=True))
    assert len(configs) == model.config.num_hidden_layers and all(mlp_width(config) > 0 for config in configs)
    if kind == "mamba":
        assert kv_bytes_per_token(model, ONE, 4) is None


def test_a_rank_of_several_holds_its_heads_and_layers():
    model = without_memory("qwen3")  # 4 layers of 4 KV heads
    alone = kv_bytes_per_token(model, ONE, 4)
    assert kv_bytes_per_token(model, MeshPlan(4, 2, 2), 4) * 4 == alone
    assert kv_bytes_per_token(model, MeshPlan(12, 4, 3), 4) * 8 == alone  # two layers at most, of one head
