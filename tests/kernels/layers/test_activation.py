"""Tests of activations: bits of an element depend on it alone; values and slopes agree with PyTorch, stay finite."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.layers import activation

PYTORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", PYTORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_have_the_same_bits_in_every_batch(name: str, dtype: torch.dtype, threads: int) -> None:
    function = getattr(activation, name)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in (1, 5, 32, 97, 160, 1021):
            x = (torch.randn(200, width) * 4).to(dtype)
            whole = function(x)
            for count in (1, 2, 3, 5, 33, 199):
                for offset in (0, 1):
                    assert torch.equal(function(x[offset : offset + count].clone()), whole[offset : offset + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", PYTORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_slopes_are_pytorchs(name: str, dtype: torch.dtype) -> None:
    mine = torch.linspace(-20, 20, 4001).to(dtype).requires_grad_()
    theirs = mine.detach().clone().requires_grad_()
    found, expected = getattr(activation, name)(mine), PYTORCH[name](theirs)
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 2e-6, "rtol": 1e-5}
    torch.testing.assert_close(found, expected, **tolerance)
    grad = torch.linspace(-1, 2, 4001).to(dtype)
    found.backward(grad)
    expected.backward(grad)
    assert mine.grad is not None and mine.grad.dtype == dtype
    torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)


@pytest.mark.parametrize("name", PYTORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_inputs_reach_their_limits_with_finite_slopes(name: str, dtype: torch.dtype) -> None:
    x = (
        torch.tensor([-3e38, -1e20, -1e13, -1e4, -200, -100, 100, 200, 1e4, 1e13, 1e20, 3e38])
        .to(dtype)
        .requires_grad_()
    )
    y = getattr(activation, name)(x)
    y.sum().backward()
    limit = torch.ones_like(x) if name == "sigmoid" else x.detach()
    positive = x.detach() > 0
    assert torch.equal(y.detach()[positive], limit[positive])
    assert bool((y.detach()[~positive].abs() < 1e-37).all())
    slope = positive.to(dtype) if name != "sigmoid" else torch.zeros_like(limit)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, slope, atol=1e-37, rtol=0)


def test_a_tensor_used_twice_adds_its_gradients() -> None:
    x = torch.randn(10, requires_grad=True)
    (activation.silu(x) + activation.silu(x)).sum().backward()
    twice = x.grad
    x.grad = None
    activation.silu(x).sum().backward()
    assert twice is not None and x.grad is not None
    torch.testing.assert_close(twice, 2 * x.grad)
