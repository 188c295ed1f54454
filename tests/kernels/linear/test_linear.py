"""Tests of linear layers: a row's bits do not depend on its neighbours; values and gradients are right."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lockstep.kernels.layers.swiglu import swiglu
from lockstep.kernels.linear import gradients
from lockstep.kernels.linear.linear import (
    SOURCE,
    LinearMethod,
    Product,
    entry_point,
    invariant_linear,
    native_path,
    native_product,
    native_products,
    padded_product,
    path_of,
    product_of,
)
from lockstep.kernels.machine import native
from lockstep.kernels.self_test import Cut, first_cut_difference, first_difference

HAS_NATIVE = native.load(SOURCE) is not None
METHODS: list[LinearMethod] = ["padded", "rows", "library", *(["native"] if HAS_NATIVE else [])]
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no compiler here")
# All ISA levels that this processor and compiler have for bfloat16 products.
LEVELS = (
    native.ISA_LEVELS[: native.ISA_LEVELS.index(native_path(torch.bfloat16)) + 1] if HAS_NATIVE else native.ISA_LEVELS
)
SHAPES = [(48, 64), (77, 250), (1, 1), (16, 15), (130, 17), (33, 1024)]


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def library_at(level: str, *more_flags: str) -> native.NativeLibrary:
    source = native.KERNELS / SOURCE
    return native.build(source, {**os.environ, "LOCKSTEP_MAX_ISA": level}, more_flags)


def product_at(level: str, *more_flags: str) -> Product:
    entry = entry_point(library_at(level, *more_flags))
    return lambda x, weight, bias: native_products(x, [(weight, bias)], entry)[0]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [*SHAPES, (700, 600)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_native_rows_have_the_same_bits_in_every_batch(
    dtype: torch.dtype, out_features: int, in_features: int, with_bias: bool
) -> None:
    x, weight = torch.randn(70, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype) if with_bias else None
    with num_threads(1):
        whole = native_product(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = float(exact.abs().max()) + 1
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=size * (2e-6 if dtype == torch.float32 else 4e-3))
    for threads in (1, 2):
        with num_threads(threads):
            for count in (1, 2, 3, 4, 5, 6, 7, 9, 16, 33):
                for offset in (0, 1, 31):
                    rows = slice(offset, offset + count)
                    assert torch.equal(native_product(x[rows], weight, bias), whole[rows]), (
                        threads,
                        count,
                        offset,
                    )
    assert torch.equal(native_product(x, weight, bias), whole)


@needs_native
def test_native_product_reads_strided_operands() -> None:
    x, weight = torch.randn(9, 40)[:, ::2], torch.randn(60, 11).T[:, ::3]
    assert torch.equal(native_product(x, weight, None), native_product(x.contiguous(), weight.contiguous(), None))


@needs_native
@pytest.mark.parametrize("level", LEVELS)
def test_every_isa_level_gives_a_row_the_same_bits_in_every_batch(level: str) -> None:
    """Check sizes that leave a remainder in each direction: rows, columns, K, pairs of values."""
    product = product_at(level)
    assert path_of(library_at(level), torch.bfloat16) == level
    for dtype, tolerance in ((torch.bfloat16, 4e-3), (torch.float32, 2e-6)):
        for out_features, in_features in ((51, 97), (16, 32), (35, 7)):
            x = random(90, in_features, dtype=dtype)
            weight, bias = random(out_features, in_features, dtype=dtype, seed=1), random(out_features, dtype=dtype)
            whole = product(x, weight, bias)
            exact = F.linear(x.double(), weight.double(), bias.double())
            torch.testing.assert_close(whole.double(), exact, rtol=0, atol=tolerance * float(exact.abs().max()))
            for count in range(1, 41):
                for offset in (0, 1, 50):
                    rows = slice(offset, offset + count)
                    assert torch.equal(product(x[rows], weight, bias), whole[rows]), (dtype, count, offset)


@needs_native
@pytest.mark.parametrize("level", LEVELS)
def test_every_isa_level_gives_the_same_bits_at_every_number_of_threads(level: str) -> None:
    product = product_at(level)
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = random(700, 260, dtype=dtype), random(330, 260, dtype=dtype, seed=1)
        with num_threads(1):
            whole = product(x, weight, None)
        for threads in (2, 4):
            with num_threads(threads):
                for count in (700, 47, 12):
                    assert torch.equal(product(x[-count:], weight, None), whole[-count:]), (dtype, threads, count)


@needs_native
def test_a_product_is_whole_where_openmp_starts_fewer_threads_than_it_is_asked_for() -> None:
    code = """
import torch
from lockstep.kernels.linear.linear import native_products

for threads in (1, 4):
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = (torch.full((n, 256), 1.0, dtype=dtype) for n in (32, 1024))
        assert torch.equal(native_products(x, [(weight, None)])[0], torch.full((32, 1024), 256.0, dtype=dtype)), threads
"""
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@needs_native
@pytest.mark.parametrize("level", LEVELS)
def test_every_isa_level_gives_a_rank_the_bits_of_the_whole_layer(level: str) -> None:
    cuts = [Cut(96, 64, "columns", 4), Cut(60, 50, "columns", 2), Cut(64, 192, "blocks", 4), Cut(40, 84, "blocks", 2)]
    for dtype in (torch.bfloat16, torch.float32):
        assert first_cut_difference(product_at(level), cuts, dtype, torch.device("cpu"), batch_rows=40) is None


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("count", "width"), [(1024, 64), (1025, 97), (1047, 20), (1055, 33), (1030, 4100)])
def test_many_rows_have_the_bits_of_few(level: str, count: int, width: int) -> None:
    """Check parts, bias, a gate, remainders of rows, columns and K, operands amid NaN, and groups of columns."""
    entry = entry_point(library_at(level))
    amid = torch.full((count + 2, width + 40), float("nan"), dtype=torch.bfloat16)
    amid[1:-1, 3 : width + 3] = random(count, width, dtype=torch.bfloat16)
    x = amid[1:-1, 3 : width + 3]
    layers = [
        (random(n, width, dtype=torch.bfloat16, seed=n), random(n, dtype=torch.bfloat16) if n % 2 else None)
        for n in (70, 33, 1, 16)
    ]
    gate = [layers[0], (random(70, width, dtype=torch.bfloat16, seed=1), random(70, dtype=torch.bfloat16, seed=2))]
    x[5], x[6, 2], layers[0][0][9, 1] = 0.0, 3e38, float("inf")
    layers[1][0][4], x[7] = -0.0, 1e-38  # sums that are zeros, and subnormal ones
    pieces = [slice(0, 1), slice(1, 40), slice(40, count - 1), slice(count - 1, count)]
    with num_threads(1):
        few = [native_products(x[rows], layers, entry) for rows in pieces]
        few_gated = [native_products(x[rows], gate, entry, gated=True)[0] for rows in pieces]
    for threads in (1, 2, 3):
        with num_threads(threads):
            for found, parts in zip(native_products(x, layers, entry), zip(*few, strict=True), strict=True):
                assert torch.equal(found.view(torch.int16), torch.cat(parts).view(torch.int16)), threads
            (found,) = native_products(x, gate, entry, gated=True)
            assert torch.equal(found.view(torch.int16), torch.cat(few_gated).view(torch.int16)), threads


@needs_native
@pytest.mark.parametrize("level", LEVELS)
def test_every_gate_has_the_same_silu_in_a_product_of_many_rows_as_of_few(level: str) -> None:
    """Check all values of bfloat16: many rows may look their silu up. Each row's gates are the row of x itself."""
    entry = entry_point(library_at(level))
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1024, 64)
    ones = torch.ones(64, dtype=torch.bfloat16)
    layers = [(torch.eye(64, dtype=torch.bfloat16), None), (torch.zeros(64, 64, dtype=torch.bfloat16), ones)]
    (many,) = native_products(x, layers, entry, gated=True)
    few = torch.cat([native_products(rows, layers, entry, gated=True)[0] for rows in x.split(256)])
    assert torch.equal(many.view(torch.int16), few.view(torch.int16))
    is_plain = x.isfinite().all(1)
    torch.testing.assert_close(many[is_plain], F.silu(x[is_plain]), rtol=1e-2, atol=1e-36)


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_finite_stays_in_its_row_and_column(level: str, dtype: torch.dtype) -> None:
    product, nan = product_at(level), float("nan")
    # Views into larger tensors full of NaN: memory around an operand must not reach the result.
    x, weight = torch.full((9, 80), nan).to(dtype), torch.full((21, 80), nan).to(dtype)
    x[1:8, :37], weight[1:20, :37] = random(7, 37, dtype=dtype), random(19, 37, dtype=dtype, seed=1)
    x, weight = x[1:8, :37], weight[1:20, :37]
    clean = product(x, weight, None)
    assert torch.equal(clean, product(x.contiguous(), weight.contiguous(), None)) and clean.isfinite().all()
    x[2, 36], weight[4, 0], weight[18, 36] = nan, float("inf"), nan
    out = product(x, weight, None)
    rows, columns = [0, 1, 3, 4, 5, 6], [n for n in range(19) if n not in (4, 18)]
    assert out[2].isnan().all() and out[:, 18].isnan().all()
    assert torch.equal(out[rows, 4], torch.where(x[rows, 0] > 0, float("inf"), float("-inf")).to(dtype))
    assert torch.equal(out[rows][:, columns], clean[rows][:, columns])


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_that_share_an_input_have_the_bits_they_have_alone(dtype: torch.dtype) -> None:
    x = random(2, 21, 70, dtype=dtype)
    layers = [(random(n, 70, dtype=dtype, seed=n), random(n, dtype=dtype) if n % 2 else None) for n in (90, 33, 1, 64)]
    for threads in (1, 2, 4):
        with num_threads(threads):
            outs = native_products(x, layers)
        for out, (weight, bias) in zip(outs, layers, strict=True):
            assert torch.equal(out, native_product(x.view(42, 70), weight, bias).view(2, 21, -1))


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "num_columns"), [(64, 48), (70, 90), (7, 15), (33, 1), (96, 300)])
def test_a_gated_product_has_the_bits_of_its_parts(dtype: torch.dtype, width: int, num_columns: int) -> None:
    x, wide = random(2, 21, width, dtype=dtype), random(num_columns, width + 9, dtype=dtype, seed=3)
    gate, up = (random(num_columns, width, dtype=dtype), random(num_columns, dtype=dtype)), (wide[:, :width], None)
    expected = swiglu(*native_products(x, [gate, up]))
    for threads in (1, 2, 4):
        with num_threads(threads):
            (found,) = native_products(x, [gate, up], gated=True)
        assert torch.equal(found, expected)
    for row in (0, 20):
        assert torch.equal(native_products(x[1, row : row + 1], [gate, up], gated=True)[0], expected[1, row : row + 1])


@needs_native
@pytest.mark.parametrize("level", LEVELS)
def test_every_isa_level_gives_a_row_of_a_gated_product_the_same_bits_in_every_batch(level: str) -> None:
    entry = entry_point(library_at(level))
    for dtype in (torch.bfloat16, torch.float32):
        x, layers = random(37, 72, dtype=dtype), [(random(50, 72, dtype=dtype, seed=i), None) for i in (1, 2)]
        (whole,) = native_products(x, layers, entry, gated=True)
        torch.testing.assert_close(whole, swiglu(*native_products(x, layers, entry)), rtol=1e-2, atol=1e-5)
        for rows in (slice(0, 1), slice(3, 20), slice(5, 37)):
            assert torch.equal(native_products(x[rows], layers, entry, gated=True)[0], whole[rows])


@needs_native
def test_a_gated_product_of_other_than_two_like_layers_is_refused() -> None:
    x, layer = random(2, 8, dtype=torch.float32), (random(4, 8, dtype=torch.float32), None)
    for layers in ([layer], [layer, (random(5, 8, dtype=torch.float32), None)], [layer] * 3):
        with pytest.raises(ValueError, match="two layers of one shape"):
            native_products(x, layers, gated=True)


@needs_native
def test_a_weight_changed_in_place_is_used_at_once() -> None:
    x, weight = random(5, 64, dtype=torch.bfloat16), random(48, 64, dtype=torch.bfloat16)
    native_product(x, weight, None)
    weight.neg_()
    assert torch.equal(native_product(x, weight, None), native_product(x, weight.clone(), None))


@needs_native
def test_the_native_product_names_what_does_not_fit() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    layers = [
        (torch.zeros(3, 8), None),
        (torch.zeros(3, 9).bfloat16(), None),
        (torch.zeros(8).bfloat16(), None),
        (torch.zeros(3, 8).bfloat16(), torch.zeros(4).bfloat16()),
    ]
    for weight, bias in layers:
        with pytest.raises(ValueError, match=r"weight is|and weight"):
            invariant_linear(x, weight, bias, method="native")


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=pytest.mark.exhaustive) if level in ("avx2", "avx512") else level for level in LEVELS],
)
def test_a_compilers_optimisation_changes_no_bit(level: str) -> None:
    """Compare the engine's build with another build of the same kernel."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows, out_features, in_features in ((1, 70, 300), (3, 51, 97), (70, 130, 768)):
            x, weight = random(rows, in_features, dtype=dtype), random(out_features, in_features, dtype=dtype, seed=1)
            bias = random(out_features, dtype=dtype, seed=2)
            expected = product_at(level)(x, weight, bias)
            for flags in (("-O1",), ("-O2", "-fno-tree-vectorize")):
                assert torch.equal(product_at(level, *flags)(x, weight, bias), expected), (dtype, flags)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_isa_level_keeps_its_bits_for_a_models_shapes(level: str) -> None:
    shapes = [(768, 768), (256, 768), (2304, 768), (768, 2304), (100, 1000)]
    for threads in (1, 4):
        with num_threads(threads):
            for dtype in (torch.bfloat16, torch.float32):
                found = first_difference(
                    product_at(level), shapes, dtype, torch.device("cpu"), row_counts=(*range(1, 41), 64, 100, 155)
                )
                assert found is None, (dtype, threads, found)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS[:-1])
def test_kernels_and_guarantees_hold_below_the_processors_level(level: str) -> None:
    """Run the tests of all kernels that LOCKSTEP_MAX_ISA affects, in a process with that setting.

    It affects neither PyTorch's attention nor the tests that choose a level themselves.
    """
    names = ("linear/test_linear.py", "test_self_test.py", "attention/test_paged.py")
    files = [str(Path(__file__).parents[1] / name) for name in names]
    chosen = ["-m", "not slow", "-k", "not torch and not every_isa_level"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *files],
        env={**os.environ, "LOCKSTEP_MAX_ISA": level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("method", ["rows", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_library_methods_have_the_same_bits_in_batches_of_one_multiple(
    method: LinearMethod, dtype: torch.dtype
) -> None:
    weight, x = torch.randn(96, 128).to(dtype), torch.randn(4, 128).to(dtype)
    product = product_of(method)
    for count in (1, 2, 3):
        assert torch.equal(product(x[:count], weight, None), product(x, weight, None)[:count])


def test_padded_rows_are_those_of_a_batch_padded_by_hand() -> None:
    x, weight, bias = torch.randn(5, 32), torch.randn(48, 32), torch.randn(48)
    by_hand = F.linear(torch.cat([x, torch.zeros(11, 32)]), weight, bias)[:5]
    assert torch.equal(padded_product(x, weight, bias, row_multiple=16), by_hand)


@pytest.mark.parametrize("has_fast_bfloat16", [False, True])
def test_a_product_of_the_backward_is_rounded_once_on_every_cpu(monkeypatch, has_fast_bfloat16: bool) -> None:
    monkeypatch.setattr(gradients, "has_fast_bfloat16", lambda: has_fast_bfloat16)
    left, right = torch.randn(70, 300).bfloat16(), torch.randn(300, 40).bfloat16()
    exact = left.double() @ right.double()
    found = gradients.gradient_product(left, right)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=2**-8)
    assert torch.equal(gradients.gradient_product(left.float(), right.float()), left.float() @ right.float())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_the_librarys(method: LinearMethod, dtype: torch.dtype, with_bias: bool) -> None:
    inputs = [torch.randn(3, 5, 24), torch.randn(20, 24), *([torch.randn(20)] if with_bias else [])]
    mine = [t.to(dtype).requires_grad_() for t in inputs]
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    grad = torch.randn(3, 5, 20).to(dtype)
    out = invariant_linear(*mine[:2], mine[2] if with_bias else None, method=method)
    expected = F.linear(*theirs)
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 2e-2}
    torch.testing.assert_close(out, expected, **tolerance)
    out.backward(grad)
    expected.backward(grad)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_weight_gets_no_gradient_and_no_rows_are_fine(method: LinearMethod) -> None:
    x, weight = torch.randn(2, 8, requires_grad=True), torch.randn(3, 8)
    invariant_linear(x, weight, method=method).sum().backward()
    assert x.grad is not None and weight.grad is None
    assert invariant_linear(torch.zeros(0, 8), weight, method=method).shape == (0, 3)


@pytest.mark.parametrize("method", METHODS)
def test_the_forward_with_gradients_has_the_bits_of_the_one_without(method: LinearMethod) -> None:
    x, weight = torch.randn(7, 64), torch.randn(48, 64)
    assert torch.equal(
        invariant_linear(x, weight, method=method),
        invariant_linear(x, weight.clone().requires_grad_(), method=method),
    )


def test_what_does_not_fit_is_named() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"x is \[2, 8\] and weight \[3, 9\]; bias is \[4\]"):
        invariant_linear(x, torch.zeros(3, 9), torch.zeros(4), method="padded")
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16"):
        invariant_linear(x, weight.bfloat16(), method="padded")
    with pytest.raises(ValueError, match=r"'fastest', not one of .*padded, native, rows, library"):
        invariant_linear(x, weight, method="fastest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        invariant_linear(x.double(), weight.double(), method="native")


@pytest.mark.parametrize("method", METHODS)
def test_k_blocks_are_added_left_to_right_and_rounded_once(method):
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (torch.randn(s, generator=generator).to(torch.bfloat16) for s in ((7, 96), (40, 96), (40,)))
    product = product_of(method)
    expected = torch.zeros(7, 40)
    for start in range(0, 96, 24):
        block = slice(start, start + 24)
        expected = expected + product(x[:, block].contiguous(), weight[:, block], None).float()
    expected = (expected + bias.float()).to(torch.bfloat16)
    assert torch.equal(invariant_linear(x, weight, bias, method=method, num_blocks=4), expected)
    assert torch.equal(
        invariant_linear(x, weight, bias, method=method, num_blocks=1), invariant_linear(x, weight, bias, method=method)
    )


@pytest.mark.parametrize("num_blocks", [3, 11, 0, -1])
def test_blocks_that_do_not_fill_the_sum_are_refused(num_blocks):
    x, weight = torch.randn(2, 10), torch.randn(3, 10)
    with pytest.raises(ValueError, match=rf"x is \[2, 10\], which {num_blocks} equal blocks do not fill"):
        invariant_linear(x, weight, method="padded", num_blocks=num_blocks)


def test_k_blocks_have_the_gradient_of_the_product():
    generator = torch.Generator().manual_seed(6)
    shapes = ((3, 8), (5, 8), (5,))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda *t: invariant_linear(*t, method="padded", num_blocks=4), tensors)
