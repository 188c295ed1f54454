"""Tests of silu(gate) * up in Triton, interpreted without a GPU: values, gradients, and bits of each element alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lockstep.kernels.layers import triton_swiglu
from lockstep.kernels.layers.swiglu import reference_slopes, reference_swiglu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ULPS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of a value


def operands(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(3, 700, generator=generator) * 3 for _ in range(3))
    gate[0, :4] = torch.tensor([0.0, -100.0, 100.0, -1e-30])
    return [each.to(DEVICE, dtype) for each in (gate, up, grad)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_those_of_the_definition(dtype: torch.dtype) -> None:
    gate, up, grad = operands(dtype)
    bar = {"rtol": ULPS[dtype], "atol": 1e-6}
    torch.testing.assert_close(triton_swiglu.forward(gate, up), reference_swiglu(gate, up), **bar)
    for found, expected in zip(triton_swiglu.slopes(gate, up, grad), reference_slopes(gate, up, grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=ULPS[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_depends_on_its_own_two_inputs_alone(dtype: torch.dtype) -> None:
    gate, up, _ = operands(dtype)
    whole = triton_swiglu.forward(gate, up)
    for rows, columns in ((slice(0, 1), slice(None)), (slice(1, 3), slice(3, 40)), (slice(2, 3), slice(699, 700))):
        assert torch.equal(triton_swiglu.forward(gate[rows, columns], up[rows, columns]), whole[rows, columns])


def test_what_is_not_served_is_refused() -> None:
    one = torch.ones(2, device=DEVICE)
    assert not triton_swiglu.serves(one.double(), one.double())
    with pytest.raises(ValueError, match="one shape"):
        triton_swiglu.forward(one, one[:1])
