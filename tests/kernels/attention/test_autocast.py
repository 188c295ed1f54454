"""A test of attention's gradients in a backward pass that runs inside the caller's autocast."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.attention.packed import varlen_attention


@pytest.mark.parametrize("has_sinks", [False, True])
def test_gradients_have_the_same_bits_inside_autocast(has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(9, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator).requires_grad_() if has_sinks else None
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    inputs = [*tensors, *([] if sinks is None else [sinks])]

    def gradients(*, is_inside: bool) -> list[torch.Tensor]:
        out = varlen_attention(*tensors, starts, scale=0.3, sinks=sinks)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            return list(torch.autograd.grad(out.square().sum(), inputs))

    for found, expected in zip(gradients(is_inside=True), gradients(is_inside=False), strict=True):
        assert found.dtype is torch.float32 and torch.equal(found, expected)
