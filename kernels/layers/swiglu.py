"""silu(gate) * up in one pass: each element depends on its two inputs alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..machine import native
from .activation import silu

SOURCE = "layers/swiglu.cpp"
PARALLEL_ELEMENTS = 1 << 15  # with fewer elements, starting threads costs more than it saves


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, of one shape and dtype; silu is rounded to that dtype; differentiable once in both."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SwiGLU.apply(gate, up)
    return _forward(gate, up)


def reference_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    dtype = gate.dtype
    if not gate.is_cpu or dtype not in (torch.bfloat16, torch.float32) or (function := _native()) is None:
        return reference_swiglu(gate, up)
    if gate.shape != up.shape or up.dtype != dtype:
        raise ValueError(f"swiglu: gate is {list(gate.shape)} {dtype}, up {list(up.shape)} {up.dtype}")
    gate, up = gate.contiguous(), up.contiguous()
    out, size = torch.empty_like(gate), gate.numel()
    threads = torch.get_num_threads() if size > PARALLEL_ELEMENTS else 1
    native.run(function, gate.data_ptr(), up.data_ptr(), out.data_ptr(), size, dtype is torch.bfloat16, threads)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        wide_type = torch.promote_types(gate.dtype, torch.float32)
        wide, grad = gate.to(wide_type), grad_out.to(wide_type)
        gates = torch.sigmoid(wide)
        grad_gate = grad * up * gates * (1 + wide * (1 - gates))
        return grad_gate.to(gate.dtype), (grad * (wide * gates)).to(up.dtype)


@cache
def _native() -> Callable[..., None] | None:
    return native.function(SOURCE, "lockstep_swiglu", [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3])
