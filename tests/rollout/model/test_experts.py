"""Tests of the products and sums of routes to experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model import experts as hosted
from lockstep.rollout.model.experts import GROUPED, NativeRoutes, Routes, TritonRoutes, hosted_experts, is_experts
from lockstep.rollout.running.recorders import first_host_read
from lockstep.tests.optional_packages import needs_triton

EXPERTS = torch.tensor([3, 0, 3, 1, 1, 3])  # of three rows; none chooses 2


def one_by_one(x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    repeats = len(EXPERTS) // len(x)
    rows = [
        F.linear(x[route // repeats], weights[e], None if biases is None else biases[e])
        for route, e in enumerate(EXPERTS.tolist())
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("num_rows", [3, 6])
def test_products_expert_by_expert_are_those_of_each_route_with_their_gradients(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weights, biases = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((num_rows, 5), (4, 3, 5), (4, 3))
    )
    routes = Routes(EXPERTS, 4)
    torch.testing.assert_close(routes.product(x, weights, biases), one_by_one(x, weights, biases))
    assert torch.autograd.gradcheck(lambda *of: routes.product(*of), (x, weights, biases))
    routes.product(x, weights.transpose(1, 2).contiguous().transpose(1, 2), None).sum().backward()
    assert weights.grad is not None and not weights.grad[2].any() and weights.grad[3].any()


def test_the_gradient_of_the_weights_is_made_once_not_once_an_expert() -> None:
    weights, made = torch.randn(4, 3, 5, requires_grad=True), []
    out = Routes(EXPERTS, 4).product(torch.randn(3, 5), weights, None)
    seen, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            made += [type(node).__name__] if "Select" in type(node).__name__ else []
            waiting += [following for following, _ in node.next_functions]
    assert made == []


def test_routes_of_a_row_are_added_in_their_order() -> None:
    outputs, weights = torch.randn(6, 7).bfloat16(), torch.rand(3, 2).bfloat16()
    parts = outputs.view(3, 2, 7) * weights[..., None]
    assert torch.equal(Routes(EXPERTS, 4).total(outputs, weights, torch.bfloat16), parts[:, 0] + parts[:, 1])


def test_an_engines_experts_are_one_call_without_gradients_and_one_each_with_them(make_model) -> None:
    model = make_model("qwen3_moe")
    engine = Engine(model, EngineConfig(kv_cache="8 blocks", max_num_seqs=2))
    modules = [module for module in model.modules() if is_experts(module)]
    assert modules
    with engine.model.numerics.installed():
        kinds = {getattr(module, GROUPED, Routes) for module in modules}
    is_native = engine.model.numerics.guarantee.linear == "native"
    assert kinds == {NativeRoutes if is_native else Routes} and not any(hasattr(m, GROUPED) for m in modules)
    assert not is_experts(nn.Linear(2, 2)) and not is_experts(model)


def test_experts_on_a_gpu_have_the_bits_of_each_and_are_not_asked_for_by_the_host(monkeypatch) -> None:
    needs_triton()
    from lockstep.kernels.linear.triton_kernels import fixed_product

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "gate_up_proj": (4, 12, 8),
        "down_proj": (4, 8, 6),
        "gate_up_proj_bias": (4, 12),
        "down_proj_bias": (4, 8),
    }
    tensors = {name: torch.randn(*shape, generator=generator).bfloat16().to(device) for name, shape in shapes.items()}
    options = {"has_gate": True, "has_bias": True, "is_transposed": False, "act_fn": nn.SiLU()}
    module: SimpleNamespace = SimpleNamespace(**tensors, **options, _apply_gate=lambda x: x, parameters=lambda: [])
    x, shares = torch.randn(3, 8, generator=generator).bfloat16().to(device), torch.rand(3, 2, generator=generator)
    chosen, shares = EXPERTS.view(3, 2).to(device), shares.to(device)
    monkeypatch.setattr(hosted, "gates_by_halves", lambda _: True)
    monkeypatch.setattr(F, "linear", fixed_product)
    expected = hosted_experts(module, x, chosen, shares)  # type: ignore[arg-type]
    setattr(module, GROUPED, TritonRoutes)
    found = hosted_experts(module, x, chosen, shares)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    if torch.cuda.is_available():
        assert torch.equal(found, expected)
        assert first_host_read(lambda: [hosted_experts(module, x, chosen, shares)]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Routes, NativeRoutes])
def test_what_an_expert_gives_is_normalised_before_its_weight(kind: type[Routes]) -> None:
    modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    config = modeling.MuseSparkTextConfig(
        num_local_experts=4, moe_hidden_size=32, moe_intermediate_size=48, experts_implementation="eager"
    )
    torch.manual_seed(0)
    experts = modeling.MuseSparkExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    x, weights = torch.randn(5, 32, dtype=torch.float32), torch.rand(5, 2, dtype=torch.float32)
    chosen = torch.tensor([[0, 3], [1, 0], [3, 2], [2, 1], [0, 1]])
    expected = experts(x, chosen, weights)
    setattr(experts, GROUPED, kind)
    with torch.no_grad():
        torch.testing.assert_close(hosted_experts(experts, x, chosen, weights), expected)
    grads = [
        torch.autograd.grad(out.square().sum(), [*experts.parameters()])
        for out in (expected, hosted_experts(experts, x, chosen, weights))
    ]
    for ours, own in zip(*grads, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_ranks_that_share_a_normalised_sum_are_refused_by_name() -> None:
    experts = nn.Module()
    experts.has_post_expert_norm, experts.post_expert_norm, experts.has_gate, experts.has_bias = (
        True,
        nn.Identity(),
        False,
        False,
    )
    experts.is_transposed, experts.act_fn = False, nn.Identity()
    experts.up_proj, experts.down_proj = nn.Parameter(torch.rand(4, 6, 5)), nn.Parameter(torch.rand(4, 5, 6))
    setattr(experts, hosted.REDUCTION, SimpleNamespace(num_blocks=2))
    with pytest.raises(ValueError, match="Module normalises what an expert gives, which ranks hold in parts of a sum"):
        hosted_experts(experts, torch.rand(3, 5), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2))
