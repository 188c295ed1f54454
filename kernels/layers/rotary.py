"""Rotary position embedding of queries and keys in one call, with exactly the bits of transformers' formula.

Letters: B batch, T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..machine import native
from ..machine.gpu import triton_serves
from .rms_norm import NormRule, rms_norm

logger = logging.getLogger(__name__)

SOURCE = "layers/rotary.cpp"
PARALLEL_ELEMENTS = 1 << 13  # with fewer elements, starting threads costs more than it saves


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """The norms of each head of queries and keys before their rotation: weights [D], and one rule."""

    query: Tensor
    key: Tensor
    rule: NormRule


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query [B,H,T,D] and key [B,K,T,D] by cos and sin [B,T,D] or [1,T,D].

    Differentiable once in query and key. The results lie in memory as [B,T,heads,D].
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return _Rotary.apply(query, key, cos, sin)
    return _forward(query, key, cos, sin)


def rotary_into_cache(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:  # fmt: skip
    """Rotate query -> [N,H,D], and write the rotated key and value [B,K,T,E] to the slots int64 [N] of the caches.

    caches: of keys [blocks,tokens,K,D] and values [blocks,tokens,K,E]; N = B * T. norms: of query and key, before.
    Not differentiable.
    """
    on_triton = triton_serves(query.device)
    if norms is not None:
        if on_triton and (at_once := _normed_on_triton(query, key, cos, sin, value, caches, slots, norms)) is not None:
            return at_once
        query, key = rms_norm(query, norms.query, norms.rule), rms_norm(key, norms.key, norms.rule)
    if on_triton:
        from . import triton_rotary

        if triton_rotary.serves(query, key, cos, sin):
            return triton_rotary.rotary_into_cache(query, key, value, cos, sin, caches, slots)
    query, key = rotary(query, key, cos, sin)
    for cached, rows in zip(caches, (key, value), strict=True):
        cached.flatten(0, 1).index_copy_(0, slots, rows.transpose(1, 2).flatten(0, 1))
    return query.transpose(1, 2).flatten(0, 1)


def _normed_on_triton(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor,
    norms: HeadNorms,
) -> Tensor | None:  # fmt: skip
    """Compute `rotary_into_cache` in one launch; None where the kernel does not serve it, or has other bits here."""
    from . import triton_head_norms  # Triton is imported only where it is used

    if not triton_head_norms.serves(query, key, cos, sin) or query.dtype is not norms.query.dtype:
        return None
    norm = norms.rule.eps, norms.rule.weight_offset, norms.rule.round_first
    if difference := triton_head_norms.first_difference(query.shape[-1], query.dtype, norm, query.device):
        _tell_once(difference)
        return None
    weights = norms.query, norms.key
    return triton_head_norms.normed_rotary_into_cache(query, key, value, weights, norm, cos, sin, caches, slots)


@cache
def _tell_once(difference: str) -> None:
    logger.warning("%s: they are three launches", difference)


def reference_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the formula of transformers' `apply_rotary_pos_emb`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _forward(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if triton_serves(query.device):
        from . import triton_rotary  # Triton is imported only where it is used

        if triton_rotary.serves(query, key, cos, sin):
            return triton_rotary.rotary(query, key, cos, sin)
    function, dtype = _native(), query.dtype
    if function is None or not query.is_cpu or dtype not in (torch.bfloat16, torch.float32):
        return reference_rotary(query, key, cos, sin)
    if not (key.dtype is dtype and cos.dtype is dtype and sin.dtype is dtype and cos.shape == sin.shape):
        return reference_rotary(query, key, cos, sin)  # its type promotion is the definition
    query, key, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, tokens, width = query.shape
    kv_heads = key.shape[1]
    if key.shape != (batch, kv_heads, tokens, width) or cos.shape[1:] != (tokens, width) or width % 2:
        raise ValueError(f"rotary: query is {list(query.shape)}, key {list(key.shape)}, cos and sin {list(cos.shape)}")
    outs = query.new_empty(batch, tokens, heads, width), key.new_empty(batch, tokens, kv_heads, width)
    threads = torch.get_num_threads() if query.numel() + key.numel() > PARALLEL_ELEMENTS else 1
    operands = []
    for tensor, out in zip((query, key), outs, strict=True):
        by_batch, by_head, by_token, _ = tensor.stride()
        operands += [tensor.data_ptr(), out.data_ptr(), by_batch, by_token, by_head, tensor.shape[1]]
    native.run(
        function,
        *operands,
        *(cos.data_ptr(), sin.data_ptr(), cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)),
        *(batch, tokens, width, dtype is torch.bfloat16, threads),
    )
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _forward(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if triton_serves(cos.device):
            from . import triton_rotary

            if triton_rotary.serves(grad_query, grad_key, cos, sin):
                return *triton_rotary.rotary(grad_query, grad_key, cos, sin, back=True), None, None
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return *(grad * cos - _rotate_half(grad * sin) for grad in (grad_query, grad_key)), None, None


@cache
def _native() -> Callable[..., None] | None:
    rows = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4]
    return native.function(SOURCE, "lockstep_rotary", [*rows, *rows, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 7])
