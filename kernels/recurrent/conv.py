"""Causal convolution of each channel over the rows of a sequence; a row of the result depends on its inputs alone.

The taps are added in fp32 from the oldest input to the newest, so a sequence may be cut anywhere. Letters: R rows,
C channels, w width, S sequences.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layers.activation import silu
from ..machine import native
from ..machine.gpu import triton_serves
from .slots import Slots, run_in_slots, state_pointers

SOURCE = "recurrent/causal_conv.cpp"
PARALLEL_ELEMENTS = 1 << 13  # with fewer elements, starting threads costs more than it saves
MAX_WIDTH = 16  # of the native kernel


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    initial: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out [R, C] and the last w - 1 inputs of each sequence [S, w - 1, C]. Differentiable once.

    x [R, C], weight [C, w], bias [C] and initial [S, w - 1, C], the inputs before each first row (None: zeros), share
    a dtype. `out` is rounded to it before the activation, "silu" or None, and after it.
    cu_seqlens: int32 [S + 1], the rows at which sequences start, and their number. Raises ValueError for operands that
    do not fit each other.
    """
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv: the activation is {activation!r}, not 'silu' or None")
    _check(x, weight, bias, initial, states_fit=initial is None or len(initial) == len(cu_seqlens) - 1)
    operands = (x, weight, bias, initial)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return _CausalConv.apply(x, weight, bias, initial, cu_seqlens, activation)
    return _forward(x, weight, bias, initial, cu_seqlens, activation)


def causal_conv_in_slots(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, slots: Slots, activation: str | None = None
) -> Tensor:
    """Compute `causal_conv` with states in slots [N, w - 1, C] that are read and written in place. Returns out."""
    _check(x, weight, bias, slots.pool, states_fit=True)
    if _is_native(x, weight):
        return _run_native(x, weight, bias, cu_seqlens, activation, slots)
    if triton_serves(x.device) and x.dtype != torch.float64:
        from . import triton_kernels  # Triton is imported only where it is used

        return triton_kernels.causal_conv_in_slots(x, weight, bias, slots, cu_seqlens, activation)

    def compute(rows: Sequence[Tensor], starts: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv(rows[0], weight, bias, starts, initial, activation)

    return run_in_slots((x,), cu_seqlens, slots, compute)


def reference_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Compute `causal_conv` with PyTorch's operations."""
    wide, channels, before = torch.promote_types(x.dtype, torch.float32), x.shape[1], weight.shape[1] - 1
    starts, num_sequences = cu_seqlens.to(x.device, torch.int64), len(cu_seqlens) - 1
    if initial is None:
        initial = x.new_zeros(num_sequences, before, channels)
    # Each sequence's rows behind its initial ones. One copy of all rows: the gradient of each slice would be as large.
    every = torch.arange(num_sequences, device=x.device)
    owner = every.repeat_interleave(starts.diff(), output_size=len(x))
    rows = torch.arange(len(x), device=x.device) + owner * before  # of each row's window
    heads, ends = ((edge + every * before)[:, None] + torch.arange(before, device=x.device) for edge in
                   (starts[:-1], starts[1:]))  # fmt: skip
    inputs = x.new_empty(len(x) + num_sequences * before, channels)
    inputs = inputs.index_copy(0, rows + before, x).index_copy(0, heads.flatten(), initial.flatten(0, 1))
    total = x.new_zeros(channels, dtype=wide) if bias is None else bias.to(wide)
    num_windows = max(len(inputs) - before, 0)
    for tap in range(before + 1):
        total = total + weight[:, tap].to(wide) * inputs[tap : tap + num_windows].to(wide)
    out = total[rows].to(x.dtype)  # windows over the border of two sequences are left out
    return silu(out) if activation else out, inputs[ends]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, *, states_fit: bool) -> None:
    """Raise ValueError for operands that do not fit each other: kernels read them by address. states_fit: in what
    depends on their use."""
    channels, width = x.shape[1], weight.shape[1]
    if states is not None:
        states_fit = states_fit and states.shape[1:] == (width - 1, channels) and states.dtype == x.dtype
    if not (
        len(weight) == channels and weight.dtype == x.dtype and states_fit
        and (bias is None or (bias.shape == (channels,) and bias.dtype == x.dtype))
    ):  # fmt: skip
        named = {"x": x, "weight": weight, "bias": bias, "states": states}
        shapes = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in named.items() if t is not None)
        raise ValueError(f"causal_conv: {shapes} do not belong together")


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    if triton_serves(x.device) and x.dtype != torch.float64:
        from . import triton_kernels  # Triton is imported only where it is used

        return triton_kernels.causal_conv(x, weight, bias, initial, cu_seqlens, activation)
    if not _is_native(x, weight):
        return reference_causal_conv(x, weight, bias, initial, cu_seqlens, activation)
    final = x.new_empty(len(cu_seqlens) - 1, weight.shape[1] - 1, x.shape[1])
    initial = None if initial is None else initial.contiguous()
    return _run_native(x, weight, bias, cu_seqlens, activation, initial, final), final


def _is_native(x: Tensor, weight: Tensor) -> bool:
    served = x.is_cpu and x.dtype in (torch.bfloat16, torch.float32) and weight.shape[1] <= MAX_WIDTH
    return served and _native() is not None


def _run_native(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str | None,
    before: Slots | Tensor | None, after: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run the native kernel. before, after: the states before and after the rows; slots are both."""
    function = _native()
    assert function is not None
    (rows, channels), width = x.shape, weight.shape[1]
    num_sequences = len(cu_seqlens) - 1
    if x.stride(1) != 1:
        x = x.contiguous()
    weight, starts = weight.contiguous(), cu_seqlens.to(torch.int32).contiguous()
    bias, out = None if bias is None else bias.contiguous(), x.new_empty(rows, channels)
    threads = torch.get_num_threads() if out.numel() > PARALLEL_ELEMENTS else 1
    native.run(
        function,
        *(x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()),
        *state_pointers(before, out, after),
        *(starts.data_ptr(), num_sequences, x.stride(0), channels, width),
        *(activation is not None, x.dtype is torch.bfloat16, threads),
        kept=(x, weight, bias, before, starts),
    )
    return out


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial: Tensor | None,
        cu_seqlens: Tensor,
        activation: str | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, bias, initial, cu_seqlens)
        ctx.activation = activation
        return _forward(x, weight, bias, initial, cu_seqlens, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        *operands, cu_seqlens = ctx.saved_tensors
        wide = torch.promote_types(grad_out.dtype, torch.float32)
        leaves: list[Any] = [None if t is None else t.detach().to(wide).requires_grad_() for t in operands]
        with torch.enable_grad():
            outputs = reference_causal_conv(*[*leaves, cu_seqlens, ctx.activation])
        given = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(outputs, given, (grad_out.to(wide), grad_final.to(wide)), allow_unused=True))
        grads = [None if t is None else next(found) for t in operands]
        return (
            *(g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, operands, strict=True)),
            None,
            None,
        )


@cache
def _native() -> Callable[..., None] | None:
    return native.function(SOURCE, "lockstep_causal_conv", [*[ctypes.c_void_p] * 9, *[ctypes.c_int64] * 7])
