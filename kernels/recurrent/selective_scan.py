"""The selective scan of Mamba-1, one token after another in fp32: S = exp(a dt') S + b (dt x)'; y = S'c + d x.

It is the gated delta rule without its correction, with a decay of each element of S, and runs in the same kernels
(`delta_rule.py`). Its backward pass takes the same steps in reverse (`scan_gradient.py`). Letters: R rows, S sequences,
H heads, N state size, P channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .delta_rule import gated_delta_rule, gated_delta_rule_in_slots
from .scan_gradient import scan_gradient
from .slots import Slots


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    cu_seqlens: Tensor,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute y [R, H, P] and each sequence's final state [S, H, N, P], both in fp32. Differentiable once.

    x [R, H, P], dt >= 0 [R, H, P], a <= 0 [H, P, N], b and c [R, H, N], d [H, P] or None. cu_seqlens: int32 [S + 1],
    the rows at which sequences start, and their number. initial [S, H, N, P], None for zeros. float64 inputs are
    computed, and give states, in float64. Raises ValueError for operands that do not fit each other.
    """
    x, dt, a, b, c = _operands(x, dt, a, b, c)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, dt, a, b, c, initial)):
        y, final = _SelectiveScan.apply(x, dt, a, b, c, initial, cu_seqlens)
    else:
        y, final = _forward(x, dt, a, b, c, initial, cu_seqlens)
    return _with_skip(y, x, d), final


def selective_scan_in_slots(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, cu_seqlens: Tensor, slots: Slots
) -> Tensor:
    """Compute `selective_scan` with states in slots [*, H, N, P] that are read and written in place. Returns y."""
    x, dt, a, b, c = _operands(x, dt, a, b, c)
    y = gated_delta_rule_in_slots(c, b, x, a, dt, cu_seqlens, slots, norm_eps=None, scale=1.0, corrects=False)
    return _with_skip(y, x, d)


def _operands(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the operands in one wide dtype, and a as [H, N, P], as the states are."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide), dt.to(wide), a.to(wide).mT, b.to(wide), c.to(wide)


def _with_skip(y: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    return y if d is None else y + d.to(x.dtype) * x


def _forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    return gated_delta_rule(c, b, x, a, dt, cu_seqlens, initial, norm_eps=None, scale=1.0, corrects=False)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor | None, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, dt, a, b, c, initial, cu_seqlens)
        ctx.set_materialize_grads(False)
        return _forward(x, dt, a, b, c, initial, cu_seqlens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        *operands, initial, cu_seqlens = ctx.saved_tensors
        return *scan_gradient(operands, initial, cu_seqlens, grad_out, grad_final), None
