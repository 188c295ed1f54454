"""Tests of the Triton product of routes with their experts, interpreted without a GPU: a route has the bits of the
product with its expert's weight alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lockstep.kernels.layers import triton_swiglu
from lockstep.kernels.linear import triton_grouped
from lockstep.kernels.linear.tiles import Tile, choose_grouped_tile
from lockstep.kernels.linear.triton_grouped import Routes, first_difference, routed_sum
from lockstep.kernels.linear.triton_kernels import fixed_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Rows, routes of a row, experts, columns, inputs: few and many rows an expert, experts without any, odd widths.
SHAPES = [(3, 2, 5, 40, 24), (1, 1, 1, 16, 32), (7, 3, 9, 34, 129), (100, 2, 2, 20, 70)]


def problem(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, experts, weights and biases of random numbers."""
    num_rows, num_routes, num_experts, columns, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x, weights, biases = (
        torch.randn(size, generator=generator).to(DEVICE, dtype)
        for size in ((num_rows, width), (num_experts, columns, width), (num_experts, columns))
    )
    return x, torch.randint(num_experts, (num_rows * num_routes,), generator=generator).to(DEVICE), weights, biases


def one_by_one(x: Tensor, experts: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    each = [fixed_product(x, weight, None if biases is None else biases[e]) for e, weight in enumerate(weights)]
    repeats = len(experts) // len(x)
    return torch.stack([each[expert][route // repeats] for route, expert in enumerate(experts.tolist())])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_route_has_the_bits_of_its_own_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, experts, weights, biases = problem(shape, dtype)
    turned = weights.transpose(1, 2).contiguous().transpose(1, 2)
    routes = Routes(experts, len(weights))
    for of_all in (None, biases):
        expected = one_by_one(x, experts, weights, of_all)
        assert torch.equal(routes.product(x, weights, of_all), expected)
        assert torch.equal(routes.product(x, turned, of_all), expected)
        if dtype in triton_swiglu.SERVED:
            gated = routes.product(x, weights, of_all, gated=True)
            assert torch.equal(gated, triton_swiglu.forward(*expected.chunk(2, dim=-1)))


def test_a_part_of_the_inputs_is_read_in_place() -> None:
    x, experts, weights, _ = problem((9, 2, 4, 32, 64), torch.bfloat16)
    part = slice(16, 48)
    found = Routes(experts, 4).product(x[:, part], weights[:, :, part])
    assert torch.equal(found, one_by_one(x[:, part].contiguous(), experts, weights[:, :, part].contiguous(), None))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 5000])
def test_routes_are_listed_by_expert_in_their_order(count: int) -> None:
    experts = torch.randint(6, (count,), generator=torch.Generator().manual_seed(count)).to(DEVICE)
    experts[experts == 2] = 5
    routes = Routes(experts, 6)
    assert torch.equal(routes._order.long(), torch.argsort(experts, stable=True))
    edges = torch.arange(7, device=DEVICE)
    assert torch.equal(routes._starts.long(), (experts[None] < edges[:, None]).sum(1))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_rows_routes_are_added_in_their_order_with_torchs_roundings(
    dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, weights = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((21, 1030), (7, 3)))
    outputs, weights = outputs.to(dtype), weights.to(weights_dtype)
    parts = outputs.view(7, 3, -1) * weights.unsqueeze(-1)
    expected = (parts[:, 0] + parts[:, 1] + parts[:, 2]).to(dtype)
    assert torch.equal(routed_sum(outputs, weights, dtype), expected)


def test_the_self_test_tells_a_tile_with_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert first_difference.__wrapped__(72, dtype, DEVICE) is None
    real = triton_grouped.Routes._launch

    def wrong(self: Routes, x: Tensor, weights: Tensor, biases: None, columns: int, tile: Tile, gated: bool) -> Tensor:
        out = real(self, x, weights, biases, columns, tile, gated)
        return torch.nextafter(out, out + 1) if tile.m == 128 and gated else out

    monkeypatch.setattr(triton_grouped.Routes, "_launch", wrong)
    found = first_difference.__wrapped__(72, torch.bfloat16, DEVICE)
    assert found == "tiles of 128 x 64, 72 inputs: the gated grouped product differs"


def test_the_tile_follows_the_number_of_routes_that_an_expert_has() -> None:
    for gated in (False, True):
        few, many = (choose_grouped_tile(torch.bfloat16, count, 128, gated=gated) for count in (256, 65_536))
        assert few.m == 64 and few.n < many.n and many.m == 128
    assert choose_grouped_tile(torch.float32, 256, 8) == choose_grouped_tile(torch.float64, 65_536, 8)


def test_arguments_that_do_not_fit_are_named() -> None:
    x, experts, weights, biases = problem((3, 2, 5, 40, 24), torch.float32)
    routes = Routes(experts, 5)
    with pytest.raises(ValueError, match=r"x is \[3, 20\] and the weights are \[5, 40, 24\]"):
        routes.product(x[:, :20], weights)
    with pytest.raises(ValueError, match="5 routes of 3 rows"):
        Routes(experts[:5], 5).product(x, weights)
    with pytest.raises(ValueError, match="weights of 4 experts for routes to 5"):
        routes.product(x, weights[:4])
    with pytest.raises(ValueError, match=r"biases are \[5, 7\]"):
        routes.product(x, weights, biases[:, :7])
    with pytest.raises(ValueError, match=r"the weights are torch\.bfloat16"):
        routes.product(x, weights.bfloat16())
    with pytest.raises(ValueError, match="gates and ups are 39 columns together"):
        routes.product(x, weights[:, :39], gated=True)
