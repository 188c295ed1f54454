"""Tests of products with chosen experts: a route has the bits of a product with its expert's weight alone."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from lockstep.kernels.layers.swiglu import swiglu
from lockstep.kernels.linear.grouped import grouped_entry_point, grouped_products
from lockstep.kernels.linear.linear import SOURCE, entry_point, native_path, native_products
from lockstep.kernels.machine import native

pytestmark = pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
# Rows, routes of a row, experts, columns, inputs: few and many rows an expert, experts without any, odd widths.
SHAPES = [(3, 2, 5, 40, 24), (32, 2, 8, 128, 96), (1, 1, 1, 16, 32), (64, 4, 6, 50, 70), (7, 3, 9, 34, 129)]


def problem(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, experts, weights and biases of random numbers."""
    num_rows, num_routes, num_experts, columns, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x, weights, biases = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((num_rows, width), (num_experts, columns, width), (num_experts, columns))
    )
    return x, torch.randint(num_experts, (num_rows * num_routes,), generator=generator), weights, biases


def one_by_one(x: Tensor, experts: Tensor, weights: Tensor, biases: Tensor | None, entry=None) -> Tensor:
    repeats = len(experts) // len(x)
    rows = []
    for route, expert in enumerate(experts.tolist()):
        layer = weights[expert], None if biases is None else biases[expert]
        rows += native_products(x[route // repeats][None], [layer], entry)
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_route_has_the_bits_of_its_own_product_for_any_number_of_threads(shape, dtype, restore_threads):
    x, experts, weights, biases = problem(shape, dtype)
    turned = weights.transpose(1, 2).contiguous().transpose(1, 2)
    for of_all in (None, biases):
        expected = one_by_one(x, experts, weights, of_all)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(grouped_products(x, experts, weights, of_all), expected)
            assert torch.equal(grouped_products(x, experts, turned, of_all), expected)
            gated = grouped_products(x, experts, weights, of_all, gated=True)
            assert torch.equal(gated, swiglu(*expected.chunk(2, dim=-1)))


def test_a_part_of_the_inputs_is_read_in_place():
    x, experts, weights, _ = problem((9, 2, 4, 32, 64), torch.bfloat16)
    part = slice(16, 48)
    found = grouped_products(x[:, part], experts, weights[:, :, part])
    assert torch.equal(found, one_by_one(x[:, part], experts, weights[:, :, part], None))


@pytest.mark.slow
@pytest.mark.parametrize("level", native.ISA_LEVELS)
def test_every_instruction_set_keeps_a_routes_bits(level):
    if native.ISA_LEVELS.index(level) > native.ISA_LEVELS.index(native_path(torch.bfloat16)):
        pytest.skip("this processor has no such instructions")
    library = native.build(native.KERNELS / SOURCE, {**os.environ, "LOCKSTEP_MAX_ISA": level})
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x, experts, weights, biases = problem(shape, dtype)
            found = grouped_products(x, experts, weights, biases, grouped_entry_point(library))
            assert torch.equal(found, one_by_one(x, experts, weights, biases, entry_point(library)))


def test_arguments_that_do_not_fit_are_named():
    x, experts, weights, biases = problem((3, 2, 5, 40, 24), torch.float32)
    with pytest.raises(ValueError, match=r"choose the experts \[-1, 5\], but there are 5"):
        grouped_products(x, torch.tensor([0, 5, -1]), weights)
    with pytest.raises(ValueError, match=r"x is \[3, 20\] and the weights are \[5, 40, 24\]"):
        grouped_products(x[:, :20], experts, weights)
    with pytest.raises(ValueError, match=r"experts are torch.int64 \[5\] for 3 rows"):
        grouped_products(x, experts[:5], weights)
    with pytest.raises(ValueError, match=r"experts are torch.int64 \[6\] for 0 rows"):
        grouped_products(x[:0], experts, weights)
    assert grouped_products(x[:0], experts[:0], weights).shape == (0, 40)
    with pytest.raises(ValueError, match=r"biases are \[5, 7\]"):
        grouped_products(x, experts, weights, biases[:, :7])
    with pytest.raises(ValueError, match=r"the weights are torch\.bfloat16"):
        grouped_products(x, experts, weights.bfloat16())
    with pytest.raises(ValueError, match="gates and ups are 39 columns together"):
        grouped_products(x, experts, weights[:, :39], gated=True)
