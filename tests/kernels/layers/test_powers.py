"""Tests of powers, other functions and sums: bits depend on the elements alone; values and slopes are PyTorch's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.kernels.layers import powers

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    **{
        f"power {exponent}": (
            lambda x, exponent=exponent: powers.power(x.abs(), exponent),
            lambda x, exponent=exponent: torch.pow(x.abs(), exponent),
        )
        for exponent in (-2, -1, -0.5, 0.1, 0.5, 1.7, 2, 3, 4)
    },
    "power of negative": (lambda x: powers.power(x, 5), lambda x: torch.pow(x, 5)),
    "power of a number": (lambda x: powers.power(1.3, x), lambda x: torch.pow(1.3, x)),
    "power of tensors": (lambda x: powers.power(x.abs(), x), lambda x: torch.pow(x.abs(), x)),
    "exp2": (powers.exp2, torch.exp2),
    "sinh": (powers.sinh, torch.sinh),
    "atan2": (lambda x: powers.atan2(x, x + 1), lambda x: torch.atan2(x, x + 1)),
    "logaddexp": (lambda x: powers.logaddexp(x, x / 2), lambda x: torch.logaddexp(x, x / 2)),
}


@pytest.fixture(params=[1, 2])
def threads(request) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_have_the_same_bits_in_every_batch(name, dtype, threads):
    function, _ = FUNCTIONS[name]
    for width in (1, 5, 32, 97, 1021):
        x = (torch.randn(200, width) * 4).to(dtype)
        whole = function(x)
        for count in (1, 2, 3, 33, 199):
            for offset in (0, 1):
                found = function(x[offset : offset + count].clone())
                assert torch.equal(found.nan_to_num(), whole[offset : offset + count].nan_to_num())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_slopes_are_pytorchs(name, dtype):
    ours, own = FUNCTIONS[name]
    mine = torch.linspace(-9, 9, 4001).to(dtype).requires_grad_()
    theirs = mine.detach().clone().requires_grad_()
    found, expected = ours(mine), own(theirs)
    assert found.dtype == expected.dtype
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-7, "rtol": 1e-5}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    for result in (found, expected):
        result.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True, **tolerance)


def test_special_numbers_are_pytorchs():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, -2.5, -1.0, -0.0, 0.0, 1e-42, 1.0, 2.5, 3e38, inf, nan])
    pairs = torch.cartesian_prod(x, x).unbind(-1)
    for ours, own in ((powers.power, torch.pow), (powers.atan2, torch.atan2), (powers.logaddexp, torch.logaddexp)):
        torch.testing.assert_close(ours(*pairs), own(*pairs), equal_nan=True, rtol=1e-5, atol=1e-38)
    for ours, own in ((powers.exp2, torch.exp2), (powers.sinh, torch.sinh)):
        torch.testing.assert_close(ours(x), own(x), equal_nan=True)
    whole = torch.tensor([2, 3], dtype=torch.int64)
    assert torch.equal(powers.power(whole, 3), whole**3) and torch.equal(powers.power(2, whole), 2**whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [torch.sum, torch.mean])
def test_a_row_by_itself_has_the_sum_that_it_has_in_a_batch(own, dtype, threads):
    function = powers.reduction(own)
    for size in (32768, 70001):
        x = torch.randn(5, size).to(dtype)
        whole = function(x, -1)
        for row in range(5):
            assert torch.equal(function(x[row : row + 1], -1), whole[row : row + 1])
            assert torch.equal(function(x[row], 0), whole[row]) and torch.equal(function(x[row]), whole[row])
            assert torch.equal(function(x[row : row + 1], dim=(0, 1), keepdim=True), whole[row].reshape(1, 1))
            assert torch.equal(function(x[row], axis=0), whole[row]) and torch.equal(function(x[row], ()), whole[row])
        wide = function(x[:1], -1, dtype=torch.float64)
        torch.testing.assert_close(wide, own(x[:1], -1, dtype=torch.float64))
        assert torch.equal(function(x[:1], dtype=torch.float32), function(x[0], 0, dtype=torch.float32))
