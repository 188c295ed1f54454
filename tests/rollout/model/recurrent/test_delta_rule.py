"""Recurrent layers in the trainer's forward: transformers' numbers and gradients, with our operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.model.recurrent.delta_rule import is_channel_delta_rule, is_delta_rule
from lockstep.rollout.model.recurrent.selective_scan import is_inner_shortcut, is_selective_scan
from lockstep.rollout.model.recurrent.state_space import is_shortcut, is_state_space
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.support.exact_numbers import InFloat64, distance
from lockstep.tests.support.random_models import initial_model

IDS = torch.tensor([[(11 * i + 3) % 250 for i in range(90)]])


def gradients(model: PreTrainedModel, ids: Tensor = IDS) -> dict[str, Tensor]:
    logits = model(ids, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return dict(zip(named, found, strict=True))


def ours(model: PreTrainedModel, ids: Tensor = IDS) -> dict[str, Tensor]:
    with HostedModel.adopt(model, dtype=None, device=None, invariant=True).training_numerics():
        return gradients(model, ids)


MAMBA = ["nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "jamba", "mamba2", "mamba", "falcon_mamba"]
MAMBA += ["zamba", "zamba2"]
DELTA = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear"]
FAMILIES = [*DELTA, *MAMBA, "lfm2", "lfm2_moe", "minimax"]
NUM_INPUTS = 8
BAR = 1e-5  # of one parameter's gradient, by its length, in float32
EVERY_FAMILY = pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])]
)


def exact(model: PreTrainedModel, ids: Tensor = IDS) -> dict[str, Tensor]:
    """Return the gradients of the module's own code in float64, to which it is converted in place."""
    model.double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    with InFloat64():
        return gradients(model, ids)


def layer_gradients(model: PreTrainedModel, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    layer = next(part for part in model.modules() if hasattr(part, "conv1d"))
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)


@pytest.mark.parametrize(
    "family", ["qwen3_5", "nemotron_h", *(pytest.param(f, marks=pytest.mark.slow) for f in [*DELTA[1:], *MAMBA[1:]])]
)
def test_gradients_of_a_layer_are_exact_or_as_near_as_its_own(make_model, family):
    """In the mean of several inputs: those of one are luck, 0.06 to 2.4 times the layer's own."""
    model = make_model(family).train()
    inputs = [(torch.randn(2, 90, 64), torch.randn(2, 90, 64)) for _ in range(NUM_INPUTS)]
    own = [layer_gradients(model, x, grad) for x, grad in inputs]
    with HostedModel.adopt(model, dtype=None, device=None, invariant=True).training_numerics():
        found = [layer_gradients(model, x, grad) for x, grad in inputs]
    model.double()
    with InFloat64():
        true = [layer_gradients(model, x.double(), grad.double()) for x, grad in inputs]
    for parameter in range(len(own[0])):
        mine, its = (
            sum(distance(one[parameter], exact[parameter]) for one, exact in zip(grads, true, strict=True)) / NUM_INPUTS
            for grads in (found, own)
        )
        assert mine < max(BAR, 1.2 * its)


@pytest.mark.parametrize("family", MAMBA)
def test_bfloat16_gradients_of_a_layer_are_as_near_to_the_exact_ones_as_its_own(make_model, family):
    model = make_model(family, torch.bfloat16).train()
    layer = next(part for part in model.modules() if hasattr(part, "conv1d"))
    inputs = [(torch.randn(2, 90, 64).bfloat16(), torch.randn(2, 90, 64).bfloat16()) for _ in range(NUM_INPUTS)]

    def all_gradients(dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for x, grad in inputs:
            leaf = x.to(dtype).requires_grad_()
            found.append(torch.autograd.grad(layer(leaf), [leaf, *layer.parameters()], grad.to(dtype)))
        return found

    own = all_gradients(torch.bfloat16)
    with HostedModel.adopt(model, dtype=None, device=None, invariant=True).training_numerics():
        found = all_gradients(torch.bfloat16)
    layer.double()
    true = all_gradients(torch.float64)
    for leaf in range(len(true[0])):
        mine, its = (sum(distance(one[leaf], exact[leaf]) for one, exact in zip(each, true, strict=True))
                     for each in (found, own))  # fmt: skip
        assert mine < 1.2 * its


@EVERY_FAMILY
def test_gradients_of_a_module_are_exact_where_its_own_may_not_be(family):
    """On transformers' own initial weights. There its chunks lose digits of A_log's gradient: up to 2e-2 of it, in
    Qwen3-Next, so a demand of equal gradients would be one of equal faults."""
    model = initial_model(family).train()
    own, found, true = gradients(model), ours(model), exact(model)
    for name in true:
        assert distance(found[name], true[name]) < BAR
        if distance(own[name], true[name]) < BAR / 2:
            assert distance(found[name], own[name]) < BAR


@EVERY_FAMILY
def test_gradients_on_spread_weights_are_exact_or_as_near_as_the_modules_own(make_model, family):
    """Weights that spread the logits multiply each rounding; the farthest parameters of both are compared, in the mean
    of several inputs."""
    model = make_model(family).train()
    inputs = [(IDS + 7 * number) % 250 for number in range(NUM_INPUTS // 2)]
    own, found = ([one(model, ids) for ids in inputs] for one in (gradients, ours))
    true = [exact(model, ids) for ids in inputs]
    mine, its = (
        sum(max(distance(grads[name], is_so[name]) for name in is_so) for grads, is_so in zip(each, true, strict=True))
        for each in (found, own)
    )
    assert mine / len(inputs) < max(BAR, 1.2 * its / len(inputs))


def test_bfloat16_gradients_are_as_near_to_the_exact_ones_as_the_modules_own(make_model):
    model = make_model("qwen3_5", torch.bfloat16).train()
    # As transformers initialises them. Weights that spread the logits multiply one rounding by ten, and then the
    # distances of one input are luck: 0.6 to 1.5 times the module's own, 1.0 in the mean of 16.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    theirs, found = gradients(model), ours(model)
    exact = gradients(model.float())
    own_distance, our_distance = (
        sum(distance(grads[name], exact[name]) for name in exact) / len(exact) for grads in (theirs, found)
    )
    assert our_distance < 1.05 * own_distance


def test_a_module_called_without_use_cache_gives_the_same_bits(make_model):
    model = make_model("qwen3_5")
    with HostedModel.adopt(model, dtype=None, device=None, invariant=True).training_numerics(), torch.no_grad():
        assert torch.equal(model(IDS[:, :2]).logits, model(IDS[:, :2], use_cache=False).logits)


def test_a_rule_is_recognised_by_its_results():
    assert is_delta_rule(torch_chunk_gated_delta_rule) and not is_channel_delta_rule(torch_chunk_gated_delta_rule)
    assert is_channel_delta_rule(chunk_kimi_delta_attention) and not is_delta_rule(chunk_kimi_delta_attention)

    def without_beta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **named: object) -> object:
        return torch_chunk_gated_delta_rule(q, k, v, g, torch.ones_like(beta), **named)

    assert not is_delta_rule(without_beta)


def test_a_scan_is_recognised_by_its_results():
    assert is_state_space(mamba2_chunk_scan) and not is_state_space(torch_chunk_gated_delta_rule)

    def without_limit(*operands: Tensor, dt_limit: object, **named: object) -> object:
        return mamba2_chunk_scan(*operands, **named)

    def fused(*operands: object, **named: object) -> Tensor:
        return IDS

    assert not is_state_space(without_limit)
    assert not is_shortcut(fused) and not is_inner_shortcut(fused)


def test_a_selective_scan_is_recognised_by_its_results():
    needs_transformers(5, 23)
    from transformers.models.mamba.modeling_mamba import mamba_inner_fn, mamba_selective_scan

    assert is_selective_scan(mamba_selective_scan) and not is_selective_scan(mamba2_chunk_scan)
    assert is_inner_shortcut(mamba_inner_fn) and not is_inner_shortcut(mamba_selective_scan)

    def without_bias(*operands: Tensor, delta_bias: object, **named: object) -> object:
        return mamba_selective_scan(*operands, **named)

    assert not is_selective_scan(without_bias)
