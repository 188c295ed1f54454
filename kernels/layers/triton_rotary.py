"""Rotary position embedding on a GPU (Triton): queries and keys in one launch, with the bits of transformers' formula.

`rotary_into_cache` also writes the rotated keys, and the values, to their slots of a paged cache. Each operation rounds
once to the tensors' dtype, as the formula's own do.

Letters: B batch, T tokens, N = B * T rows, H query heads, K KV heads, D head size, E value size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_launches import early_launch, wait_for_inputs
from ..machine.triton_numbers import INTERPRETED, rounded, widened

SERVED = (torch.float32, torch.bfloat16, torch.float16)
_HEADS = 4  # of one program


def serves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether these kernels serve these tensors, of one dtype and an even width."""
    fits = query.dtype in SERVED and query.dtype is key.dtype is cos.dtype is sin.dtype and query.shape[-1] % 2 == 0
    return fits and key.shape[2:] == query.shape[2:] and cos.shape[1:] == query.shape[2:]


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate query [B,H,T,D] and key [B,K,T,D] by cos and sin [B,T,D] or [1,T,D].

    back: compute the gradients of query and key from those of the results instead.
    """
    batch, heads, tokens, width = query.shape
    outs = query.new_empty(batch, tokens, heads, width), key.new_empty(batch, tokens, key.shape[1], width)
    _launch(query, key, cos, sin, *outs, back=back)
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


def rotary_into_cache(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor
) -> Tensor:
    """Rotate query -> [N,H,D], and write the rotated key and the value [B,K,T,E] to the caches' slots int64 [N].

    caches: keys [blocks,tokens,K,D] and values [blocks,tokens,K,E], contiguous.
    """
    batch, heads, tokens, width = query.shape
    rows = batch * tokens
    if slots.shape != (rows,) or not all(cache.is_contiguous() for cache in caches):
        raise ValueError(f"{rows} rows have {list(slots.shape)} slots of caches that must be contiguous")
    out = query.new_empty(rows, heads, width)
    _launch(query, key, cos, sin, out, caches[0], value, caches[1], slots)
    return out


def _launch(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, out_query: Tensor, out_key: Tensor,
    value: Tensor | None = None, out_value: Tensor | None = None, slots: Tensor | None = None, *, back: bool = False,
) -> None:  # fmt: skip
    if not (query.is_cuda or INTERPRETED.value) or not serves(query, key, cos, sin):
        raise ValueError(f"Triton's rotary embedding serves a GPU, not {query.dtype} of {list(query.shape)}")
    query, key, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, tokens, width = query.shape
    kv_heads = key.shape[1]
    value_width, parts = 1, [heads, kv_heads]
    if value is not None:
        value = value if value.stride(-1) == 1 else value.contiguous()
        value_width, parts = value.shape[-1], [*parts, kv_heads]
    if not out_query.numel():
        return
    grid = (batch * tokens, sum(triton.cdiv(count, _HEADS) for count in parts))
    other = key if value is None else value
    with torch.cuda.device_of(query):
        _rotary_kernel[grid](
            *(query, key, other, cos, sin, out_query, out_key, other if out_value is None else out_value),
            *(query if slots is None else slots, tokens, heads, kv_heads),
            *(*query.stride()[:3], *key.stride()[:3], *other.stride()[:3]),
            *(cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), kv_heads * width, kv_heads * value_width),
            HALF=width // 2, HALF_PAD=triton.next_power_of_2(width // 2), E=value_width,
            E_PAD=triton.next_power_of_2(value_width), HEADS=_HEADS, WRITES=slots is not None, BACK=back,
            enable_fp_fusion=False, **early_launch(query.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _rotary_kernel(
    query, key, value, cos, sin, out_query, out_key, out_value, slots,
    tokens, heads, kv_heads,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, c_batch, c_token, key_row, value_row,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, HEADS: tl.constexpr,
    WRITES: tl.constexpr, BACK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of a row, of the query or of the key, or copy as many heads of the value."""
    wait_for_inputs(IS_EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, token = row // tokens, row % tokens
    query_parts, key_parts = tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    at = row
    if WRITES:
        at = tl.load(slots + row)
    is_key = part >= query_parts
    if part >= query_parts + key_parts:
        copied = (part - query_parts - key_parts) * HEADS + tl.arange(0, HEADS)
        e = tl.arange(0, E_PAD)
        is_there = (copied < kv_heads)[:, None] & (e < E)[None, :]
        from_ptr = value + batch * v_batch + token * v_token + copied[:, None] * v_head + e[None, :]
        to_ptr = out_value + at * value_row + copied[:, None] * E + e[None, :]
        tl.store(to_ptr, tl.load(from_ptr, mask=is_there), mask=is_there)
        return
    head = (part - tl.where(is_key, query_parts, 0)) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF_PAD)
    angle = batch * c_batch + token * c_token + d
    cos_low, cos_high = tl.load(cos + angle, mask=d < HALF), tl.load(cos + angle + HALF, mask=d < HALF)
    sin_low, sin_high = tl.load(sin + angle, mask=d < HALF), tl.load(sin + angle + HALF, mask=d < HALF)
    if is_key:
        mask = (head < kv_heads)[:, None] & (d < HALF)[None, :]
        read = key + batch * k_batch + token * k_token + head[:, None] * k_head + d[None, :]
        write = out_key + at * key_row + head[:, None] * (2 * HALF) + d[None, :]
    else:
        mask = (head < heads)[:, None] & (d < HALF)[None, :]
        read = query + batch * q_batch + token * q_token + head[:, None] * q_head + d[None, :]
        write = out_query + (row * heads + head)[:, None] * (2 * HALF) + d[None, :]
    low, high = tl.load(read, mask=mask), tl.load(read + HALF, mask=mask)
    if BACK:
        _store_sum(write, _product(low, cos_low), _product(high, sin_high), mask)
        _store_sum(write + HALF, _product(high, cos_high), -_product(low, sin_low), mask)
    else:
        _store_sum(write, _product(low, cos_low), _product(-widened(high), sin_low), mask)
        _store_sum(write + HALF, _product(high, cos_high), _product(low, sin_high), mask)


@triton.jit
def _product(x, angle):
    """Multiply heads [H,D] by a row [D], rounded to the angle's dtype -> float32."""
    return widened(rounded(widened(x) * widened(angle)[None, :], angle.dtype))


@triton.jit
def _store_sum(pointers, left, right, mask):
    tl.store(pointers, rounded(left + right, pointers.dtype.element_ty), mask=mask)
