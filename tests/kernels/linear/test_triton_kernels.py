"""Tests of the Triton product, interpreted without a GPU: values, and bits that do not depend on other rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from lockstep.kernels.layers import triton_swiglu
from lockstep.kernels.linear import triton_kernels as triton_linear
from lockstep.kernels.linear.linear import LinearMethod, invariant_linear, product_of
from lockstep.kernels.linear.tiles import Tile, choose_tile, num_programs
from lockstep.kernels.machine import gpu as gpu_kernels
from lockstep.kernels.self_test import Cut, default_candidates, first_cut_difference, first_difference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

METHODS: list[LinearMethod] = ["triton", "triton_fixed"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float64: 1e-14}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def scaled_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).abs().max() / (exact.abs().max() + 1))


SHAPES = [(5, 48, 64), (150, 77, 250), (1, 1, 1), (3, 130, 17)]
VALUES = list(itertools.product(DTYPES, METHODS, SHAPES))
SLOW_VALUES = [case for case in VALUES if case[2] == SHAPES[1] and case[:2] != (torch.bfloat16, "triton")]
ROWS = list(itertools.product(DTYPES[:3], METHODS))
QUICK_ROWS = [(torch.float32, "triton"), (torch.bfloat16, "triton")]


def slow(case: tuple[Any, ...]) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "method", "shape"), [slow(case) if case in SLOW_VALUES else case for case in VALUES])
def test_values_are_those_of_an_exact_product_rounded(
    dtype: torch.dtype, method: LinearMethod, shape: tuple[int, int, int]
) -> None:
    rows, out_features, in_features = shape
    x, weight = noise(rows, in_features, dtype=dtype), noise(out_features, in_features, dtype=dtype, seed=1)
    bias = noise(out_features, dtype=dtype, seed=2)
    for given in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
        assert scaled_error(product_of(method)(x, weight, given), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "method"), [case if case in QUICK_ROWS else slow(case) for case in ROWS])
def test_rows_have_the_same_bits_in_every_batch_on_both_sides_of_the_tile_shapes(
    dtype: torch.dtype, method: LinearMethod
) -> None:
    x, weight, bias = noise(170, 100, dtype=dtype), noise(70, 100, dtype=dtype, seed=1), noise(70, dtype=dtype)
    product = product_of(method)
    whole = product(x, weight, bias)
    for count, offset in [(1, 0), (1, 169), (2, 31), (33, 5), (64, 1), (65, 64), (127, 43), (128, 0), (129, 41)]:
        rows = slice(offset, offset + count)
        assert torch.equal(product(x[rows], weight, bias), whole[rows]), (count, offset)


@pytest.mark.parametrize("method", ["triton", slow(("triton_fixed",))])
def test_the_self_test_passes_the_product_and_its_cuts(method: LinearMethod) -> None:
    cuts = [Cut(48, 80, "columns", 2), Cut(20, 128, "blocks", 2)]
    product, dtype = product_of(method), torch.bfloat16
    assert first_difference(product, [(33, 80), (40, 17)], dtype, DEVICE, row_counts=(1, 33)) is None
    assert first_cut_difference(product, cuts, dtype, DEVICE, batch_rows=130) is None


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    x, weight = noise(6, 40), noise(10, 40, seed=1)
    broken = x.clone()
    broken[2] = torch.nan
    broken[4] = torch.inf
    out, rest = product_of("triton")(broken, weight, None), [0, 1, 3, 5]
    assert torch.equal(out[rest], product_of("triton")(x, weight, None)[rest]) and out[2].isnan().all()


def test_strided_operands_give_the_bits_of_contiguous_ones() -> None:
    x, weight, bias = noise(9, 40)[:, ::2], noise(60, 11).T[:, ::3], noise(22)[::2]
    straight = product_of("triton")(x.contiguous(), weight.contiguous(), bias.contiguous())
    assert torch.equal(product_of("triton")(x, weight, bias), straight)


def test_no_rows_and_no_inputs_are_fine() -> None:
    assert product_of("triton")(noise(0, 8), noise(3, 8), None).shape == (0, 3)
    assert torch.equal(product_of("triton")(noise(2, 0), noise(3, 0), noise(3)), noise(3).expand(2, 3))


@pytest.mark.parametrize("num_blocks", [1, slow((2,))])
def test_gradients_pass_gradcheck_in_double_and_the_forward_keeps_its_bits(num_blocks: int) -> None:
    inputs = tuple(noise(*shape, dtype=torch.float64).requires_grad_() for shape in ((1, 2, 4), (3, 4), (3,)))

    def linear(*args: torch.Tensor) -> torch.Tensor:
        return invariant_linear(*args, method="triton", num_blocks=num_blocks)

    assert torch.autograd.gradcheck(linear, inputs)
    with torch.no_grad():
        alone = linear(*inputs)
    assert torch.equal(linear(*inputs), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_librarys(dtype: torch.dtype) -> None:
    mine = [noise(*shape, dtype=dtype).requires_grad_() for shape in ((2, 5, 24), (20, 24), (20,))]
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    grad = noise(2, 5, 20, dtype=dtype, seed=3)
    invariant_linear(*mine, method="triton").backward(grad)
    F.linear(*theirs).backward(grad)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **({} if dtype == torch.float32 else {"atol": 0.1, "rtol": 2e-2}))


def test_the_choice_of_triton_says_why_not() -> None:
    assert "cpu" in gpu_kernels.why_not_triton("cpu")
    assert not gpu_kernels.triton_serves(torch.device("cpu"))
    assert not {"triton", "triton_fixed"} & {c.method for c in default_candidates(torch.device("cpu"), torch.float32)}


def test_a_dtype_that_is_not_served_is_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        triton_linear.product(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32), None)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_many_shapes_have_the_same_bits_in_every_batch(method: LinearMethod) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shapes = [(out, width) for out in (16, 77) for width in (15, 300)]
        assert first_difference(product_of(method), shapes, dtype, DEVICE, row_counts=(1, 3, 8, 33, 127, 128)) is None


WIDTHS_OF_LAYERS = [(70, 33, 18), (33,), (40, 40)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow((torch.float32,)), slow((torch.float16,))])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_of_one_launch_have_the_bits_of_separate_launches(dtype: torch.dtype, has_bias: bool) -> None:
    x = noise(9, 5, 100, dtype=dtype)
    for widths in WIDTHS_OF_LAYERS:
        layers = [(noise(n, 100, dtype=dtype, seed=n), noise(n, dtype=dtype) if has_bias else None) for n in widths]
        found = triton_linear.products(x, layers)
        for out, (weight, bias) in zip(found, layers, strict=True):
            assert torch.equal(out, triton_linear.fixed_product(x.flatten(0, 1), weight, bias).view_as(out))
    gate, up = layers
    expected = triton_swiglu.forward(*found)
    assert torch.equal(triton_linear.gated_product(x, gate, up), expected)
    for row in (0, 44):
        alone = triton_linear.gated_product(x.flatten(0, 1)[row : row + 1], gate, up)
        assert torch.equal(alone[0], expected.flatten(0, 1)[row])


def test_layers_that_one_launch_cannot_serve_are_computed_apart() -> None:
    x = noise(4, 24)
    mixed = [(noise(6, 24), None), (noise(6, 24, seed=1), noise(6)), (noise(24, 6, seed=2).T, None)]
    for out, layer in zip(triton_linear.products(x, mixed), mixed, strict=True):
        assert torch.equal(out, triton_linear.product(x, *layer))
    plain, strided = mixed[0][0], mixed[2][0]
    found = triton_linear.gated_product(x, (plain, None), (strided, None))
    assert torch.equal(found, triton_swiglu.forward(triton_linear.product(x, plain, None), out))
    with pytest.raises(ValueError, match=r"two layers of one shape, not \[\[6, 24\], \[5, 24\]\]"):
        triton_linear.gated_product(x, (plain, None), (noise(5, 24), None))


@pytest.mark.parametrize("dtype", [slow((torch.float32,)), slow((torch.bfloat16,)), slow((torch.float16,))])
def test_every_tile_has_the_bits_of_the_fixed_one(dtype: torch.dtype) -> None:
    assert triton_linear.first_tile_difference([100, 64], dtype, DEVICE) is None


def test_a_tile_with_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Tile(16, 32, 8, num_warps=4, num_stages=2)  # adds steps of 8 to a sum where the others add 32
    monkeypatch.setattr(triton_linear, "tiles_of", lambda dtype: (other,))
    assert "tiles of 16 x 32, 100 inputs" in str(triton_linear.first_tile_difference([100], torch.float32, DEVICE))


ONE_WAVE = 128  # programs for the 132 processors of an H100: as fast as more, measured, with longer steps under way
LAYERS_OF_8B = {"q|k|v": (4096, 1024, 1024), "o": (4096,), "gate|up": (12288,), "down": (4096,), "head": (151_936,)}


@pytest.mark.parametrize("name", LAYERS_OF_8B)
def test_grids_fill_a_gpu_at_the_shapes_of_an_8b_model_from_one_row_to_2048(name: str) -> None:
    for rows in (1, 16, 32, 64, 65, 127, 128, 129, 256, 512, 2048):
        columns = LAYERS_OF_8B[name]
        tile = choose_tile(torch.bfloat16, rows, columns, gated=name == "gate|up")
        assert num_programs(tile, rows, columns) >= ONE_WAVE, (rows, tile)
        assert tile.m <= 64 or rows > 64


def test_narrow_layers_get_the_most_programs_and_no_cliff_at_128_rows() -> None:
    narrow = choose_tile(torch.bfloat16, 1, (1024,))
    assert num_programs(narrow, 1, (1024,)) == max(
        num_programs(t, 1, (1024,)) for t in triton_linear.tiles_of(torch.bfloat16)
    )
    for columns in LAYERS_OF_8B.values():
        below, above = (choose_tile(torch.bfloat16, rows, columns) for rows in (127, 128))
        assert below == above


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="no GPU")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layers_of_an_8b_model_have_the_same_bits_in_every_batch(method: LinearMethod, dtype: torch.dtype) -> None:
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (32768, 4096)]
    counts = (1, 2, 3, 8, 16, 33, 64, 100, 127, 128, 129, 256, 1000)
    assert first_difference(product_of(method), shapes, dtype, DEVICE, batch_rows=2048, row_counts=counts) is None
    x, weight = noise(300, 4096, dtype=dtype), noise(6144, 4096, dtype=dtype, seed=1)
    exact = F.linear(x.double(), weight.double())
    assert scaled_error(product_of(method)(x, weight, None), exact) < 2 * TOLERANCE[dtype]
