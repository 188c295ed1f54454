"""Tests of the gradients of silu(gate) * up in one pass."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.layers import swiglu as module
from lockstep.kernels.layers.swiglu import PARALLEL_ELEMENTS, reference_slopes, swiglu

DTYPES = (torch.float32, torch.bfloat16)
GATES = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 3e4, -3e4])


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(4 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(3)]


def gradients(gate: torch.Tensor, up: torch.Tensor, grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    return torch.autograd.grad(swiglu(gate, up), (gate, up), grad_out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_double_precision(dtype):
    gate, up, grad_out = drawn((37, 61), dtype)
    gate.view(-1)[: len(GATES)] = GATES.to(dtype)
    wide = [tensor.double().requires_grad_() for tensor in (gate, up)]
    expected = torch.autograd.grad(torch.nn.functional.silu(wide[0]) * wide[1], wide, grad_out.double())
    for one, exact in zip(gradients(gate, up, grad_out), expected, strict=True):
        assert one.dtype == dtype
        tolerance = 2e-6 if dtype == torch.float32 else 2.0**-8
        torch.testing.assert_close(one.double(), exact, rtol=tolerance, atol=1e-6)
    for one, slow in zip(gradients(gate, up, grad_out), reference_slopes(gate, up, grad_out), strict=True):
        torch.testing.assert_close(one, slow, rtol=2 * tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_elements_gradients_do_not_depend_on_the_others(dtype, restore_threads):
    gate, up, grad_out = drawn((PARALLEL_ELEMENTS + 13,), dtype)
    torch.set_num_threads(2)
    whole = gradients(gate, up, grad_out)
    for start, end in ((0, 1), (3, 20), (5, 5 + 16), (PARALLEL_ELEMENTS - 3, PARALLEL_ELEMENTS + 13)):
        part = gradients(gate[start:end], up[start:end], grad_out[start:end])
        assert all(torch.equal(one, all_[start:end]) for one, all_ in zip(part, whole, strict=True))


def test_layouts_dtypes_and_sizes_of_gradients():
    gate, up, grad_out = drawn((6, 10), torch.bfloat16)
    plain = gradients(gate, up, grad_out)
    turned = gradients(gate.t().contiguous().t(), up.t().contiguous().t(), grad_out.t().contiguous().t())
    assert all(torch.equal(one, other) for one, other in zip(plain, turned, strict=True))
    expanded = gradients(gate, up, torch.ones((), dtype=torch.bfloat16).expand(6, 10))
    assert all(torch.isfinite(one).all() for one in expanded)
    assert all(one.shape == (0, 4) for one in gradients(*drawn((0, 4), torch.float32)))
    double = gradients(*drawn((3, 5), torch.float64))
    assert all(one.dtype == torch.float64 for one in double)


def test_without_the_library_the_reference_computes_them(monkeypatch):
    operands = drawn((9, 7), torch.float32)
    native = gradients(*operands)
    monkeypatch.setattr(module, "_native", lambda name, num_tensors: None)
    slow = gradients(*operands)
    for one, other in zip(native, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-6, atol=1e-6)
