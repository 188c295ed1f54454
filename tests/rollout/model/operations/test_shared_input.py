"""Tests of layers that read one tensor in one call: only after a watched forward, and with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lockstep.kernels.linear import linear
from lockstep.kernels.machine import native
from lockstep.rollout.model.operations.shared_input import SharedInput, siblings_of
from lockstep.tests.support.random_models import random_model

pytestmark = pytest.mark.skipif(native.load(linear.SOURCE) is None, reason="needs a C++ compiler")


PRODUCTS = {"together": linear.native_products}


class Projections(nn.Module):
    def __init__(self, use: Callable[[Projections, Tensor], Tensor]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(48, 32), nn.Linear(48, 16, bias=False), nn.Linear(48, 16)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def in_turn(module: Projections, x: Tensor) -> Tensor:
    return torch.cat((module.q_proj(x), module.k_proj(x), module.v_proj(x)), dim=-1)


def backwards(module: Projections, x: Tensor) -> Tensor:
    values, keys = module.v_proj(x), module.k_proj(x)
    return torch.cat((module.q_proj(x), keys, values), dim=-1)


def two_of_them(module: Projections, x: Tensor) -> Tensor:
    return torch.cat((module.q_proj(x), module.v_proj(x)), dim=-1)


def two_inputs(module: Projections, x: Tensor) -> Tensor:
    return torch.cat((module.q_proj(x), module.k_proj(x * 2), module.v_proj(x)), dim=-1)


def changed_between(module: Projections, x: Tensor) -> Tensor:
    x = x.clone()
    queries = module.q_proj(x)
    x.mul_(2)
    return torch.cat((queries, module.k_proj(x), module.v_proj(x)), dim=-1)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Record the number of layers of each call of the native product; calls with one layer are left out."""
    counts: list[int] = []

    def counted(x: Tensor, layers: list[linear.Layer]) -> list[Tensor]:
        counts.append(len(layers))
        return linear.native_products(x, layers)

    monkeypatch.setitem(PRODUCTS, "together", counted)
    return counts


def shared(module: Projections) -> list[nn.Linear]:
    [layers] = siblings_of(module)
    alone = partial(linear.invariant_linear, method="native")
    together = SharedInput(layers, alone, lambda x, layers: PRODUCTS["together"](x, layers))
    for index, layer in enumerate(layers):
        layer.forward = together.forward_of(index)
    return layers


def apart(module: Projections, x: Tensor) -> Tensor:
    own = {layer: layer.__dict__.pop("forward") for layer in module.children()}
    for layer in own:
        layer.forward = partial(lambda layer, x: linear.native_product(x, layer.weight, layer.bias), layer)
    try:
        return module(x)
    finally:
        for layer, forward in own.items():
            layer.forward = forward


@pytest.mark.parametrize("use", [in_turn, backwards, two_of_them, two_inputs, changed_between])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_are_those_of_layers_apart_and_only_layers_of_one_input_are_shared(use, dtype, calls):
    torch.manual_seed(0)
    module = Projections(use).to(dtype)
    shared(module)
    with torch.inference_mode():
        for rows in (5, 1, 40):
            x = torch.randn(rows, 48).to(dtype)
            assert torch.equal(module(x), apart(module, x))
    assert calls == ([3, 3] if use is in_turn else [])


def test_a_layer_asked_otherwise_than_it_was_seen_computes_for_itself(calls):
    torch.manual_seed(0)
    module = Projections(in_turn)
    shared(module)
    x, other = torch.randn(3, 48), torch.randn(4, 48)
    with torch.no_grad():
        module(x)
        for use in (two_inputs, two_of_them, backwards, in_turn):
            for given in (x, other):
                module.use = use
                assert torch.equal(module(given), apart(module, given))
        module.q_proj.weight.mul_(2)  # an update
        assert torch.equal(module(x), apart(module, x))
    assert calls


def test_a_forward_with_gradients_is_not_shared_and_has_the_same_bits(calls):
    torch.manual_seed(0)
    module = Projections(in_turn)
    shared(module)
    x = torch.randn(3, 48)
    with torch.no_grad():
        module(x)
        without = module(x)
    assert calls == [3]
    out = module(x)
    out.sum().backward()
    assert torch.equal(out, without)
    assert calls == [3]
    assert all(layer.weight.grad is not None for layer in module.children())


def test_nothing_is_kept_of_a_forward(calls):
    module = Projections(in_turn)
    [*layers] = shared(module)
    together = layers[0].forward.__closure__[1].cell_contents
    with torch.no_grad():
        for _ in range(2):
            module(torch.randn(3, 48))
            assert (together._x, together._seen, together._outs) == (None, None, [])


def test_siblings_are_plain_layers_of_one_width():
    model = random_model("llama")
    found = [[layer.out_features for layer in layers] for m in model.modules() for layers in siblings_of(m)]
    config = model.config
    kv_width = config.num_key_value_heads * config.head_dim
    query_width = config.num_attention_heads * config.head_dim
    assert found == [[query_width, kv_width, kv_width], [config.intermediate_size] * 2] * config.num_hidden_layers
    layer = model.model.layers[0]
    layer.self_attn.k_proj = nn.Sequential(layer.self_attn.k_proj)
    layer.mlp.up_proj = nn.Linear(config.hidden_size + 1, 8)
    assert not [found for module in layer.modules() for found in siblings_of(module)]
