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
from ..machine.gpu import triton_serves
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
    if triton_serves(gate.device):
        from . import triton_swiglu  # Triton is imported only where it is used

        if triton_swiglu.serves(gate, up):
            return triton_swiglu.forward(gate, up)
    if not _is_native(gate) or (function := _native("lockstep_swiglu", 3)) is None:
        return reference_swiglu(gate, up)
    if gate.shape != up.shape or up.dtype != gate.dtype:
        raise ValueError(f"swiglu: gate is {list(gate.shape)} {gate.dtype}, up {list(up.shape)} {up.dtype}")
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _run(function, gate, up, out)
    return out


def reference_slopes(gate: Tensor, up: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up, in fp32 or wider, rounded at the end."""
    wide_type = torch.promote_types(gate.dtype, torch.float32)
    wide, grad = gate.to(wide_type), grad_out.to(wide_type)
    gates = torch.sigmoid(wide)
    grad_gate = grad * up * gates * (1 + wide * (1 - gates))
    return grad_gate.to(gate.dtype), (grad * (wide * gates)).to(up.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        if triton_serves(gate.device):
            from . import triton_swiglu

            if triton_swiglu.serves(gate, up):
                return triton_swiglu.slopes(gate, up, grad_out.to(gate.dtype))
        if not _is_native(gate) or (function := _native("lockstep_swiglu_slopes", 5)) is None:
            return reference_slopes(gate, up, grad_out)
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _run(function, gate, up, grad_out.to(gate.dtype).contiguous(), grad_gate, grad_up)
        return grad_gate, grad_up


def _is_native(gate: Tensor) -> bool:
    return gate.is_cpu and gate.dtype in (torch.bfloat16, torch.float32)


def _run(function: Callable[..., None], *tensors: Tensor) -> None:
    first = tensors[0]
    threads = torch.get_num_threads() if first.numel() > PARALLEL_ELEMENTS else 1
    addresses = (tensor.data_ptr() for tensor in tensors)
    native.run(function, *addresses, first.numel(), first.dtype is torch.bfloat16, threads)


@cache
def _native(name: str, num_tensors: int) -> Callable[..., None] | None:
    return native.function(SOURCE, name, [*[ctypes.c_void_p] * num_tensors, *[ctypes.c_int64] * 3])
