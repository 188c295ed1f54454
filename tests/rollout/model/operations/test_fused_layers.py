"""Tests of norms, gated MLPs and rotary embedding in one pass: correct, invariant by row, used only if recognised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lockstep.kernels.layers.rms_norm import NormRule, reference_rms_norm, rms_norm
from lockstep.kernels.layers.rotary import reference_rotary, rotary
from lockstep.kernels.layers.swiglu import reference_swiglu, swiglu
from lockstep.kernels.linear.linear import invariant_linear, native_product, native_products
from lockstep.rollout.model.operations.fused_layers import fused_forward, gates_by_halves

RULES = [NormRule(1e-6), NormRule(1e-5, 0.0, False), NormRule(1e-6, 1.0, False)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
FUSED = {  # family -> kinds of parts, by the end of their class names, that a kernel computes
    "llama": {"RMSNorm", "MLP", "Attention"},
    "qwen2": {"RMSNorm", "MLP", "Attention"},
    "qwen3": {"RMSNorm", "MLP", "Attention"},
    "mistral": {"RMSNorm", "MLP", "Attention"},
    "gemma2": {"RMSNorm", "Attention"},  # its MLP has another activation
    "gemma3": {"RMSNorm", "Attention"},
    "gpt_oss": {"RMSNorm"},  # its rotary embedding has tables of half the width
    "qwen3_moe": {"RMSNorm", "Attention"},
}


def close(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


def gradients(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    found = function(*leaves)
    outs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(9)
    sum((out.float() * torch.randn(out.shape, generator=generator)).sum() for out in outs).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@DTYPES
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [5, 32, 300])
def test_a_norm_is_its_definition_and_a_row_alone_has_its_bits(dtype, rule, width, restore_threads):
    x, weight = (torch.randn(400, width) * 3).to(dtype), torch.randn(width).to(dtype)
    torch.set_num_threads(2)
    whole = rms_norm(x, weight, rule)
    torch.testing.assert_close(whole, reference_rms_norm(x, weight, rule), **close(dtype))
    torch.set_num_threads(1)
    assert torch.equal(rms_norm(x, weight, rule), whole)
    for rows in (slice(0, 1), slice(7, 12), slice(101, 400)):
        assert torch.equal(rms_norm(x[rows].clone(), weight, rule), whole[rows])
        assert torch.equal(rms_norm(x[rows], weight, rule), whole[rows])
    assert torch.equal(rms_norm(x.view(20, 20, width).transpose(0, 1), weight, rule)[3, 4], whole[83])


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_a_norm_are_those_of_its_definition(rule):
    x, weight = torch.randn(7, 3, 40), torch.randn(40)
    mine = gradients(lambda x, w: rms_norm(x, w, rule), x, weight)
    theirs = gradients(lambda x, w: reference_rms_norm(x, w, rule), x, weight)
    assert len(mine) == 2
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@DTYPES
def test_swiglu_is_its_definition_and_an_element_depends_on_itself(dtype, restore_threads):
    gate, up = ((torch.randn(300, 177) * 4).to(dtype) for _ in range(2))
    torch.set_num_threads(2)
    whole = swiglu(gate, up)
    torch.testing.assert_close(whole, reference_swiglu(gate, up), **close(dtype))
    torch.set_num_threads(1)
    assert torch.equal(swiglu(gate, up), whole)
    for rows in (slice(0, 1), slice(5, 8), slice(99, 300)):
        assert torch.equal(swiglu(gate[rows], up[rows]), whole[rows])
    extreme = torch.tensor([-3e38, -1e4, -100.0, 0.0, 100.0, 1e4, 3e38]).to(dtype)
    found = swiglu(extreme, torch.ones_like(extreme))
    assert bool(found.isfinite().all()) and torch.equal(found[3:], extreme[3:])
    mine, theirs = gradients(swiglu, gate, up), gradients(reference_swiglu, gate, up)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **close(dtype))


@DTYPES
@pytest.mark.parametrize("width", [6, 32, 80])
@pytest.mark.parametrize("batch", [1, 3])
def test_rotary_embedding_has_the_bits_of_transformers_formula(dtype, width, batch, restore_threads):
    torch.set_num_threads(2)
    query, key = (torch.randn(batch, 70, heads, width).to(dtype).transpose(1, 2) for heads in (6, 2))
    cos, sin = (torch.randn(1 if shared else batch, 70, width).to(dtype) for shared in (True, True))
    for found, expected in zip(rotary(query, key, cos, sin), reference_rotary(query, key, cos, sin), strict=True):
        assert torch.equal(found, expected)
    mine = gradients(lambda q, k: rotary(q, k, cos, sin), query, key)
    theirs = gradients(lambda q, k: reference_rotary(q, k, cos, sin), query, key)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **close(dtype))


@pytest.mark.parametrize("family", FUSED)
def test_what_a_kernel_computes_is_recognised_in_every_family(make_model, family):
    names = [type(m).__name__ for m in make_model(family).modules() if fused_forward(m) is not None]
    assert {kind for kind in ("RMSNorm", "MLP", "Attention") if any(n.endswith(kind) for n in names)} == FUSED[family]
    assert all(name.endswith(("RMSNorm", "MLP", "Attention")) for name in names)


class AlmostNorm(nn.Module):
    """An RMS norm with eps in another place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        root = wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon
        return self.weight * (wide / root).to(hidden_states.dtype)


class AlmostMLP(nn.Module):
    """A module with the names of a gated MLP, but with the gate on the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


@pytest.mark.parametrize("module", [AlmostNorm(), AlmostMLP(), nn.LayerNorm(8)])
def test_what_computes_something_else_keeps_its_own_code(module):
    assert fused_forward(module) is None


@DTYPES
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_a_replaced_part_computes_what_its_own_code_does(make_model, family, dtype):
    model = make_model(family, dtype)
    replaced = [(m, fused_forward(m)) for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert replaced
    for module, forward in replaced:
        x = torch.randn(2, 3, module.weight.shape[0]).to(dtype)
        with torch.no_grad():
            module.weight.normal_()
            torch.testing.assert_close(forward(x), module(x), **close(dtype))


@DTYPES
def test_a_gated_mlp_is_one_product_but_for_gradients_and_hooks(make_model, monkeypatch, dtype):
    def counted(x, *layers):
        calls.append(len(layers))
        return native_products(x, layers, gated=True)[0]

    mlp = next(m for m in make_model("qwen3", dtype).modules() if type(m).__name__ == "Qwen3MLP")
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        monkeypatch.setattr(layer, "forward", lambda x, own=layer: native_product(x, own.weight, own.bias))
    forward, calls, seen = fused_forward(mlp, lambda module: True, counted), [], []
    x = torch.randn(2, 3, mlp.gate_proj.in_features).to(dtype)
    with torch.no_grad():
        fused = forward(x)
        assert calls == [2]
        handle = mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
        assert torch.equal(forward(x), fused)
        assert seen == [1]
        assert len(calls) == 1
        handle.remove()
        assert torch.equal(fused_forward(mlp)(x), fused)
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        trainable = partial(invariant_linear, weight=layer.weight, bias=layer.bias, method="native")
        monkeypatch.setattr(layer, "forward", trainable)
    trained = forward(x.requires_grad_())
    assert torch.equal(trained, fused)
    assert len(calls) == 1
    trained.sum().backward()
    assert x.grad.abs().sum() > 0


def test_a_gate_that_is_patched_later_is_recognised_anew(make_model, monkeypatch):
    experts = next(part for part in make_model("qwen3_moe").modules() if hasattr(part, "_apply_gate"))
    assert gates_by_halves(experts)
    own = type(experts)._apply_gate
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, x: own(self, x) * 2)
    assert not gates_by_halves(experts)
    monkeypatch.setattr(type(experts), "_apply_gate", own)
    assert gates_by_halves(experts)
    monkeypatch.setattr(experts, "_apply_gate", lambda x: own(experts, x) * 2, raising=False)
    assert not gates_by_halves(experts)
