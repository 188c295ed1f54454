"""Tests of norms of heads with their rotation and the KV write in Triton, interpreted without a GPU."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lockstep.kernels.layers import rotary as rotary_module
from lockstep.kernels.layers import triton_head_norms, triton_rms_norm, triton_rotary
from lockstep.kernels.layers.rms_norm import NormRule
from lockstep.kernels.layers.rotary import HeadNorms, rotary_into_cache
from lockstep.kernels.layers.triton_head_norms import first_difference, normed_rotary_into_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NORMS = [(1e-6, 0.0, True), (1e-5, 1.0, False), (1e-5, 0.0, False)]


def operands(width: int, dtype: torch.dtype, tokens: int = 7) -> tuple[Tensor, ...]:
    """Return query and key as views of one product, value, weights, cos and sin."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(1, tokens, 8 * width + 3, generator=generator).to(DEVICE, dtype)[..., 3:]
    query, key, value = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in rows.split(
        [4 * width, 2 * width, 2 * width], dim=-1))  # fmt: skip
    angles = torch.randn(1, tokens, width, generator=generator).to(DEVICE, dtype)
    weights = torch.randn(2, width, generator=generator).to(DEVICE, dtype)
    return query, key, value, weights, angles.cos(), angles.sin()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [32, 40, 128])
def test_one_launch_has_the_bits_of_all_and_writes_nothing_else(width: int, dtype: torch.dtype, norm) -> None:
    query, key, value, weights, cos, sin = operands(width, dtype)
    slots = torch.tensor([15, 2, 0, 9, 8, 5, 12], device=DEVICE)
    found, expected = ([torch.full((4, 4, 2, width), 9.0, dtype=dtype, device=DEVICE) for _ in range(2)]
                       for _ in range(2))  # fmt: skip
    both = weights[0], weights[1]
    out = normed_rotary_into_cache(query, key, value, both, norm, cos, sin, (found[0], found[1]), slots)
    heads = [triton_rms_norm.forward(x, weight, *norm) for x, weight in zip((query, key), both, strict=True)]
    caches = expected[0], expected[1]
    assert torch.equal(out, triton_rotary.rotary_into_cache(*heads, value, cos, sin, caches, slots))
    assert all(map(torch.equal, found, expected))
    assert first_difference.__wrapped__(width, dtype, norm, DEVICE) is None


def test_a_kernel_with_other_bits_is_not_used_and_that_is_said(monkeypatch, caplog) -> None:
    query, key, value, weights, cos, sin = operands(32, torch.float32)
    norms, slots = HeadNorms(weights[0], weights[1], NormRule(1e-6)), torch.arange(7, device=DEVICE)
    monkeypatch.setattr(rotary_module, "triton_serves", lambda device: True)
    real, caches = triton_head_norms.normed_rotary_into_cache, [torch.zeros(4, 4, 2, 32, device=DEVICE)] * 2
    calls = []

    def counted(*args: object) -> Tensor:
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(triton_head_norms, "normed_rotary_into_cache", counted)
    first_difference.cache_clear()
    expected = rotary_into_cache(query, key, cos, sin, value, (caches[0], caches[1]), slots, norms)
    assert len(calls) == 2  # the check, and the call
    monkeypatch.setattr(triton_head_norms, "normed_rotary_into_cache", lambda *args: counted(*args) + 1)
    first_difference.cache_clear()
    with caplog.at_level(logging.WARNING, "lockstep"):
        found = rotary_into_cache(query, key, cos, sin, value, (caches[0], caches[1]), slots, norms)
    first_difference.cache_clear()
    assert len(calls) == 3
    torch.testing.assert_close(found, expected)
    assert "queries of heads of 32 differ" in caplog.text


def test_what_does_not_fit_is_refused() -> None:
    query, key, value, weights, cos, sin = operands(32, torch.float32)
    cache, both = torch.zeros(4, 4, 2, 32, device=DEVICE), (weights[0], weights[1])
    with pytest.raises(ValueError, match="slots of caches that must be contiguous"):
        normed_rotary_into_cache(query, key, value, both, NORMS[0], cos, sin, (cache, cache), torch.arange(6))
    wide = [t.double() for t in (query, key, value)]
    with pytest.raises(ValueError, match=r"serve a GPU, not torch\.float64"):
        normed_rotary_into_cache(*wide, both, NORMS[0], cos, sin, (cache, cache), torch.arange(7))
