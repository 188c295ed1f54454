"""The norms of queries' and keys' heads, their rotation and the KV write on a GPU (Triton), in one launch.

Models such as Qwen3 and Gemma3 normalise each head before its rotation: three launches of a decode step, each of which
takes longer to begin than to compute. A program normalises one head as `triton_rms_norm.py` does, in a row of lanes of
its own, and rotates it as `triton_rotary.py` does, so that the bits are those of the three; `first_difference` checks
this on the device.

Letters: B batch, T tokens, N = B * T rows, H query heads, K KV heads, D head size, E value size.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_launches import UNFUSED, early_launch, wait_for_inputs
from ..machine.triton_numbers import INTERPRETED, rounded, widened
from . import triton_rms_norm, triton_rotary
from .triton_rms_norm import scale_of, weighted

MAX_WIDTH = 512  # of a head that one warp normalises, as the norm alone does: other lanes add in another order
Norm = tuple[float, float, bool]  # eps, weight_offset, round_first

# Neither numbers nor alignments are specialised, as those of the norm alone are not: where a row starts may not change
# the order of additions.
_NUMBERS = ["tokens", "heads", "kv_heads", "width", "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token"]
_NUMBERS += ["v_batch", "v_head", "v_token", "c_batch", "c_token", "key_row", "value_row"]
_POINTERS = [
    "query",
    "key",
    "value",
    "q_weight",
    "k_weight",
    "cos",
    "sin",
    "out_query",
    "out_key",
    "out_value",
    "slots",
]


def serves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether this kernel serves these tensors."""
    return triton_rotary.serves(query, key, cos, sin) and query.shape[-1] <= MAX_WIDTH


def normed_rotary_into_cache(
    query: Tensor, key: Tensor, value: Tensor, weights: tuple[Tensor, Tensor], norm: Norm, cos: Tensor, sin: Tensor,
    caches: tuple[Tensor, Tensor], slots: Tensor,
) -> Tensor:  # fmt: skip
    """Normalise and rotate query [B,H,T,D] -> [N,H,D], and key [B,K,T,D], which is written with value [B,K,T,E] to the
    caches' slots int64 [N].

    weights: of the queries' and of the keys' norm, [D]. cos and sin: [B,T,D] or [1,T,D]. caches: keys
    [blocks,tokens,K,D] and values [blocks,tokens,K,E], contiguous.
    """
    if not (query.is_cuda or INTERPRETED.value) or not serves(query, key, cos, sin):
        raise ValueError(f"the norms of heads in Triton serve a GPU, not {query.dtype} of {list(query.shape)}")
    batch, heads, tokens, width = query.shape
    if slots.shape != (batch * tokens,) or not all(cache.is_contiguous() for cache in caches):
        raise ValueError(f"{batch * tokens} rows have {list(slots.shape)} slots of caches that must be contiguous")
    query, key, value, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value, cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    kv_heads, value_width, (eps, weight_offset, round_first) = key.shape[1], value.shape[-1], norm
    out = query.new_empty(batch * tokens, heads, width)
    if not out.numel():
        return out
    with torch.cuda.device_of(query):
        _head_kernel[(batch * tokens, heads + 2 * kv_heads)](
            *(query, key, value, *(weight.contiguous() for weight in weights), cos, sin, out, *caches, slots),
            *(tokens, heads, kv_heads, width, eps, weight_offset),
            *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
            *(cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), kv_heads * width, kv_heads * value_width),
            BLOCK=triton.next_power_of_2(width), E=value_width, E_PAD=triton.next_power_of_2(value_width),
            ROUND_FIRST=round_first, HAS_OFFSET=bool(weight_offset), num_warps=1, **UNFUSED,
            **early_launch(query.device),
        )  # fmt: skip
    return out


@cache
def first_difference(width: int, dtype: torch.dtype, norm: Norm, device: torch.device) -> str | None:
    """Describe the first tensor whose bits are not those of norms, rotation and write one after another, or None."""
    generator = torch.Generator().manual_seed(6)
    query, key, angles, weights = (
        torch.randn(*shape, width, generator=generator, dtype=torch.float32).to(device, dtype)
        for shape in ((1, 9, 3), (1, 9, 2), (1, 9), (2,))
    )
    query, key, slots = query.transpose(1, 2), key.transpose(1, 2), torch.arange(9, device=device)
    cos, sin = angles.cos(), angles.sin()
    found, expected = ([torch.zeros(1, 9, 2, width, dtype=dtype, device=device) for _ in range(2)] for _ in range(2))
    both = weights[0], weights[1]
    rotated = normed_rotary_into_cache(query, key, key, both, norm, cos, sin, (found[0], found[1]), slots)
    heads = [triton_rms_norm.forward(x, weight, *norm) for x, weight in zip((query, key), both, strict=True)]
    caches = expected[0], expected[1]
    plain = triton_rotary.rotary_into_cache(heads[0], heads[1], key, cos, sin, caches, slots)
    if not torch.equal(rotated, plain):
        return f"queries of heads of {width} differ where they are normalised and rotated at once"
    if not all(map(torch.equal, found, expected)):
        return f"keys of heads of {width} differ where they are normalised and rotated at once"
    return None


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _head_kernel(
    query, key, value, q_weight, k_weight, cos, sin, out_query, out_key, out_value, slots,
    tokens, heads, kv_heads, width, eps, weight_offset,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, c_batch, c_token, key_row, value_row,
    BLOCK: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, ROUND_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate one head of a row, of the query or of the key, or copy one of the value."""
    wait_for_inputs(IS_EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, token = row // tokens, row % tokens
    slot = tl.load(slots + row)
    if part >= heads + kv_heads:
        head, e = part - heads - kv_heads, tl.arange(0, E_PAD)
        copied = tl.load(value + batch * v_batch + token * v_token + head * v_head + e, mask=e < E)
        tl.store(out_value + slot * value_row + head * E + e, copied, mask=e < E)
        return
    if part >= heads:
        head = part - heads
        read, weight = key + batch * k_batch + token * k_token + head * k_head, k_weight
        write = out_key + slot * key_row + head * width
    else:
        read, weight = query + batch * q_batch + token * q_token + part * q_head, q_weight
        write = out_query + (row * heads + part) * width
    dtype: tl.constexpr = out_query.dtype.element_ty
    d = tl.arange(0, BLOCK)
    is_low, has = d < width // 2, d < width
    other = tl.where(is_low, d + width // 2, d - width // 2)
    mine = tl.load(read + d, mask=has, other=0.0).to(tl.float32)
    scale = scale_of(mine, width, eps)
    mine = weighted(
        mine, scale, tl.load(weight + d, mask=has, other=0.0), weight_offset, dtype, ROUND_FIRST, HAS_OFFSET
    )
    theirs = tl.load(read + other, mask=has, other=0.0).to(tl.float32)
    its_weight = tl.load(weight + other, mask=has, other=0.0)
    theirs = widened(weighted(theirs, scale, its_weight, weight_offset, dtype, ROUND_FIRST, HAS_OFFSET))
    angle = batch * c_batch + token * c_token + d
    left = rounded(widened(mine) * widened(tl.load(cos + angle, mask=has, other=0.0)), dtype)
    right = tl.where(is_low, -theirs, theirs) * widened(tl.load(sin + angle, mask=has, other=0.0))
    tl.store(write + d, rounded(widened(left) + widened(rounded(right, dtype)), dtype), mask=has)
