"""Attention that several layers share: KV of each layer, and the layer of each call."""

from __future__ import annotations

import pytest

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.operations.shared_attention import LAYER, shared_attention_forward


@pytest.mark.parametrize(("family", "num_scans"), [("zamba", 2), ("zamba2", 1)])
def test_layers_that_share_a_block_have_kv_and_states_of_their_own(make_model, family, num_scans):
    model = make_model(family)
    first, second = ([p for n, p in layer.named_parameters() if "self_attn" in n] for layer in model.model.layers[1::2])
    assert first and all(a is b for a, b in zip(first, second, strict=True))
    hosted = Engine(model, EngineConfig(kv_cache="16 blocks")).model
    assert [shape.num_kv_heads for shape in hosted.kv_shapes] == [0, 4, 0, 4]
    assert [len(states) for states in hosted.state_shapes.values()] == [1 + num_scans] * 4


def test_only_attention_that_is_told_its_layer_is_taken(make_model):
    own = {
        family: [m for m in make_model(family).modules() if shared_attention_forward(m)]
        for family in ("zamba", "zamba2", "jamba", "llama")
    }
    names = {family: sorted({type(module).__name__ for module in found}) for family, found in own.items()}
    assert names == {"zamba": ["ZambaAttention"], "zamba2": ["Zamba2Attention"], "jamba": [], "llama": []}

    class Attention(type(own["zamba2"][0])):
        def forward(self, hidden_states, layer_idx, **named):
            return named

    module = own["zamba2"][0]
    module.__class__ = Attention
    assert shared_attention_forward(module)(None, 3, mask=None) == {"mask": None, LAYER: 3}
