"""Tensors whose memory does not hold their numbers: every kernel that reads a caller's weights or logits refuses them.

A kernel would read at address 0, and end the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.kernels.layers.rms_norm import NormRule, rms_norm
from lockstep.kernels.linear.grouped import grouped_products
from lockstep.kernels.linear.linear import invariant_linear, native_products
from lockstep.kernels.sampling.logprobs import scaled_logprobs, selected_logprobs

ROWS, EXPERTS = torch.ones(2, 8), torch.tensor([0, 1])


class Quantised(torch.Tensor):
    """A tensor of a class with operations of its own, as torchao's and DTensor."""

    @staticmethod
    def __new__(cls, whole: Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)

    def __init__(self, whole: Tensor):
        self.whole = whole

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(one.whole if isinstance(one, cls) else one for one in args), **(kwargs or {}))


def quantised(*shape: int) -> Tensor:
    return Quantised(torch.ones(shape))


def fake(*shape: int) -> Tensor:
    return FakeTensorMode().from_tensor(torch.ones(shape))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda make: invariant_linear(ROWS, make(3, 8), method="native"), "invariant_linear: weight is a "),
        (lambda make: invariant_linear(ROWS, make(3, 8), method="rows"), "invariant_linear: weight is a "),
        (lambda make: invariant_linear(make(2, 8), ROWS, method="native"), "invariant_linear: x is a "),
        (lambda make: native_products(ROWS, [(ROWS, make(2))]), "invariant_linear: bias is a "),
        (lambda make: rms_norm(ROWS, make(8), NormRule(1e-6)), "rms_norm: weight is a "),
        (lambda make: rms_norm(make(2, 8), ROWS[0], NormRule(1e-6)), "rms_norm: x is a "),
        (lambda make: grouped_products(ROWS, EXPERTS, make(2, 3, 8)), "grouped_products: weights is a "),
        (lambda make: selected_logprobs(make(2, 8), EXPERTS), "selected_logprobs: logits is a "),
        (lambda make: scaled_logprobs(make(2, 8), 1.0), "scaled_logprobs: logits is a "),
    ],
)
@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize(("make", "kind"), [(quantised, "Quantised"), (fake, "FakeTensor")])
def test_it_is_refused_by_name(call: Callable[..., object], message: str, needs_grad: bool, make, kind: str) -> None:
    with pytest.raises(ValueError, match=message + kind):
        call(lambda *shape: make(*shape).requires_grad_(needs_grad))


def test_a_norm_with_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rms_norm: x is \[2, 8\] and weight \[0\]"):  # ungathered, of ZeRO-3
        rms_norm(ROWS, torch.ones(0), NormRule(1e-6))
    with pytest.raises(ValueError, match=r"rms_norm: x is torch.bfloat16 and weight torch.float32"):
        rms_norm(torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8), NormRule(1e-6))
