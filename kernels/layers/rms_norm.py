"""Root-mean-square norm over the last dimension; each row of the result depends on its own row of the input alone.

The squares of a row are added in fp32. The row is rounded to the input's dtype at the place where the module that holds
the weight does so: before the weight as in Llama, or after it as in Gemma (which adds 1 to the weight) and gpt-oss.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..machine import native
from ..machine.gpu import triton_serves
from ..machine.plain_memory import has_plain_memory, refuse_other_memory

SOURCE = "layers/rms_norm.cpp"
PARALLEL_ELEMENTS = 1 << 13  # with fewer elements, starting threads costs more than it saves


@dataclass(frozen=True)
class NormRule:
    """Options of a norm. weight_offset: added to the weight. round_first: round to x's dtype before weighting."""

    eps: float
    weight_offset: float = 0.0
    round_first: bool = True


def rms_norm(x: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
    """Compute x [...,D] / rms(x) * weight [D]; x, weight and result share a dtype; differentiable once in both.
    Raises ValueError for a weight of another size or dtype."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, rule)
    return _forward(x, weight, rule)


def rms_norm_of_sum(left: Tensor, right: Tensor, weight: Tensor, rule: NormRule) -> tuple[Tensor, Tensor]:
    """Compute left + right [...,D] and its norm, with the bits of the two operations; not differentiable."""
    if triton_serves(left.device):
        from . import triton_rms_norm

        if triton_rms_norm.serves(left):
            return triton_rms_norm.forward_of_sum(left, right, weight, rule.eps, rule.weight_offset, rule.round_first)
    total = left + right
    return total, _forward(total, weight, rule)


def reference_rms_norm(x: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
    """Compute the norm by the plain definition, as transformers writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rule.eps)
    if rule.round_first:
        return _with_offset(weight, rule) * wide.to(x.dtype)
    return (wide * _with_offset(weight.float(), rule)).to(x.dtype)


def _with_offset(weight: Tensor, rule: NormRule) -> Tensor:
    return weight + rule.weight_offset if rule.weight_offset else weight


def _forward(x: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
    if not (has_plain_memory(weight) and has_plain_memory(x)):
        refuse_other_memory("rms_norm", x=x, weight=weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: x is {list(x.shape)} and weight {list(weight.shape)}")
    if weight.dtype != x.dtype:
        raise ValueError(f"rms_norm: x is {x.dtype} and weight {weight.dtype}")
    if triton_serves(x.device):
        from . import triton_rms_norm  # Triton is imported only where it is used

        if triton_rms_norm.serves(x):
            return triton_rms_norm.forward(x, weight, rule.eps, rule.weight_offset, rule.round_first)
    dtype = x.dtype
    if not x.is_cpu or dtype not in (torch.bfloat16, torch.float32) or (function := _native()) is None:
        return reference_rms_norm(x, weight, rule)
    if not x.is_contiguous():
        x = x.contiguous()
    if not weight.is_contiguous():
        weight = weight.contiguous()
    out, width, size = torch.empty_like(x), x.shape[-1], x.numel()
    threads = torch.get_num_threads() if size > PARALLEL_ELEMENTS else 1
    native.run(
        function,
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), size // width, width),
        *(rule.eps, rule.weight_offset, rule.round_first, dtype is torch.bfloat16, threads),
    )
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rule = rule
        return _forward(x, weight, rule)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if triton_serves(x.device):
            from . import triton_rms_norm

            if triton_rms_norm.serves(x):
                return *triton_rms_norm.backward(x, weight, ctx.rule.eps, ctx.rule.weight_offset, grad_out), None
        wide_type = torch.promote_types(x.dtype, torch.float32)
        wide, grad = x.to(wide_type), grad_out.to(wide_type)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.rule.eps)
        normed = wide * scale
        grad_normed = grad * _with_offset(weight.to(wide_type), ctx.rule)
        grad_x = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def with_sum(
    call: Callable[..., None], arguments: tuple[Any, ...], left: Tensor, right: Tensor, total: Tensor
) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """Merge a recorded call of the native norm with the sum left + right -> `total` that was computed before it.

    Returns the function and arguments that compute both in one pass, with the same bits; None where `call` is not the
    native norm or does not read `total`.
    """
    both = _native("lockstep_add_rms_norm", 5)
    if both is None or call is not _native():
        return None
    if total.data_ptr() != arguments[0] or total.numel() != arguments[3] * arguments[4]:
        return None
    dtype = torch.bfloat16 if arguments[8] else torch.float32
    for tensor in (left, right, total):
        if tensor.dtype is not dtype or tensor.shape != total.shape or not (tensor.is_cpu and tensor.is_contiguous()):
            return None
    return both, (left.data_ptr(), right.data_ptr(), *arguments)


@cache
def _native(name: str = "lockstep_rms_norm", num_tensors: int = 3) -> Callable[..., None] | None:
    types = [*[ctypes.c_void_p] * num_tensors, *[ctypes.c_int64] * 2, *[ctypes.c_float] * 2, *[ctypes.c_int64] * 3]
    return native.function(SOURCE, name, types)
