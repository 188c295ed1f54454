"""The state space recurrence of Mamba-2, one token after another in fp32: S = exp(dt a) S + dt B x'; y = S'C + D x.

It is the gated delta rule without its correction, and runs in the same kernels (`delta_rule.py`). Letters: R rows,
S sequences, G groups, H heads, N state size, P head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .delta_rule import gated_delta_rule, gated_delta_rule_in_slots
from .slots import Slots


def state_space(
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

    x [R, H, P], dt >= 0 [R, H], a <= 0 [H], b and c [R, G, N], d [H] or None; each group serves H / G heads in a row.
    cu_seqlens: int32 [S + 1], the rows at which sequences start, and their number. initial [S, H, N, P], None for
    zeros. float64 inputs are computed, and give states, in float64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, a, b, c = (t.to(wide) for t in (x, dt, a, b, c))
    y, final = gated_delta_rule(c, b, x, dt * a, dt, cu_seqlens, initial, norm_eps=None, scale=1.0, corrects=False)
    return _with_skip(y, x, d), final


def state_space_in_slots(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, cu_seqlens: Tensor, slots: Slots
) -> Tensor:
    """Compute `state_space` with states in slots [*, H, N, P] that are read and written in place. Returns y."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, a, b, c = (t.to(wide) for t in (x, dt, a, b, c))
    y = gated_delta_rule_in_slots(c, b, x, dt * a, dt, cu_seqlens, slots, norm_eps=None, scale=1.0, corrects=False)
    return _with_skip(y, x, d)


def _with_skip(y: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    return y if d is None else y + d.to(x.dtype).unsqueeze(-1) * x
