"""Tests of the rotary embedding in Triton, interpreted without a GPU: the bits of the formula, and of the cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lockstep.kernels.layers import triton_rotary
from lockstep.kernels.layers.rotary import reference_rotary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 7, 8, 2, 32), (2, 3, 3, 1, 24)]  # batch, tokens, query heads, KV heads, width


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query and key as a module's views make them, cos and sin."""
    batch, tokens, heads, kv_heads, width = shape
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(batch, tokens, n, width, generator=generator) for n in (heads, kv_heads))
    angles = torch.randn(1, tokens, width, generator=generator)
    tensors = (query.transpose(1, 2), key.transpose(1, 2), angles.cos(), angles.sin())
    return [each.to(DEVICE, dtype) for each in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_keys_have_the_bits_of_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = operands(shape, dtype)
    for found, expected in zip(triton_rotary.rotary(*tensors), reference_rotary(*tensors), strict=True):
        assert torch.equal(found, expected)
    query, key, cos, sin = tensors
    back = triton_rotary.rotary(query, key, cos, sin, back=True)
    for found, grad in zip(back, (query, key), strict=True):
        low, high = (grad * sin[:, None]).chunk(2, dim=-1)
        assert torch.equal(found, grad * cos[:, None] - torch.cat((-high, low), dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_written_to_their_slots_and_nothing_else_is(dtype: torch.dtype) -> None:
    query, key, cos, sin = operands(SHAPES[0], dtype)
    value = torch.randn(1, 7, 2, 20).to(DEVICE, dtype).transpose(1, 2)
    keys, values = (torch.full((4, 4, 2, width), 9.0, dtype=dtype, device=DEVICE) for width in (32, 20))
    slots = torch.tensor([15, 2, 0, 9, 8, 5, 12], device=DEVICE)
    out = triton_rotary.rotary_into_cache(query, key, value, cos, sin, (keys, values), slots)
    rotated = reference_rotary(query, key, cos, sin)
    assert torch.equal(out, rotated[0][0].transpose(0, 1))
    for cache, rows in ((keys, rotated[1]), (values, value)):
        expected = torch.full_like(cache, 9.0)
        expected.flatten(0, 1)[slots] = rows[0].transpose(0, 1)
        assert torch.equal(cache, expected)


def test_a_row_has_its_bits_in_any_step() -> None:
    query, key, cos, sin = operands(SHAPES[0], torch.bfloat16)
    whole = triton_rotary.rotary(query, key, cos, sin)
    for rows in (slice(3, 4), slice(5, 7)):
        alone = triton_rotary.rotary(query[:, :, rows], key[:, :, rows], cos[:, rows], sin[:, rows])
        assert all(torch.equal(a, b[:, :, rows]) for a, b in zip(alone, whole, strict=True))


def test_slots_and_caches_that_do_not_fit_are_refused() -> None:
    query, key, cos, sin = operands(SHAPES[0], torch.float32)
    cache = torch.zeros(2, 4, 2, 32, device=DEVICE)
    for slots, caches in ((torch.arange(6), (cache, cache)), (torch.arange(7), (cache[:, ::2], cache))):
        with pytest.raises(ValueError, match="slots of caches that must be contiguous"):
            triton_rotary.rotary_into_cache(query, key, key, cos, sin, caches, slots.to(DEVICE))
    assert not triton_rotary.serves(query, key, cos.double(), sin.double())
