"""Linear layers: equal bits whatever the neighbours, right values, right gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from lockstep.kernels import native
from lockstep.kernels.linear import (
    SOURCE,
    LinearMethod,
    invariant_linear,
    native_product,
    padded_product,
    product_of,
)

HAS_NATIVE = native.load(SOURCE) is not None
METHODS: list[LinearMethod] = ["padded", "rows", "library", *(["native"] if HAS_NATIVE else [])]
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no compiler here")
SHAPES = [(48, 64), (77, 250), (1, 1), (16, 15), (130, 17), (33, 1024)]


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    torch.testing.assert_close(
        whole.double(), exact, rtol=0, atol=size * (2e-6 if dtype == torch.float32 else 4e-3)
    )
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
    assert torch.equal(
        native_product(x, weight, None), native_product(x.contiguous(), weight.contiguous(), None)
    )


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_the_librarys(
    method: LinearMethod, dtype: torch.dtype, with_bias: bool
) -> None:
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
    with pytest.raises(ValueError, match="'fastest', not one of padded, native, rows, library"):
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


def test_k_blocks_have_the_gradient_of_the_product():
    generator = torch.Generator().manual_seed(6)
    shapes = ((3, 8), (5, 8), (5,))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda *t: invariant_linear(*t, method="padded", num_blocks=4), tensors)
