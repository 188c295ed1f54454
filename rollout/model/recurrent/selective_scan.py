"""The selective scan of transformers' Mamba-1 layers: the recognition of their function, and ours in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.layers.activation import silu, softplus
from ....kernels.recurrent.selective_scan import selective_scan, selective_scan_in_slots
from .delta_rule import UNLIKE
from .heads import HeadDivision
from .rows import LayerCall, rows_of

Forward = Callable[..., Any]


def selective_scan_of(module: nn.Module, division: HeadDivision, call: LayerCall) -> Forward:
    """Return the scan for one layer, with the signature of transformers' function and the layer's states.

    Its channels are divided among ranks as heads are: they share b and c, as heads of a group do.
    """

    def mamba_selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: object,
    ) -> Tensor:
        # hidden_states, dt and z [B, C, T], A [C, N], B and C [B, N, T], D and delta_bias [C]
        assert not return_last_state, "a hosted layer gets no cache"
        if not delta_softplus:
            raise ValueError(f"{type(module).__name__}: a scan without softplus is not supported")
        batch, num_channels, num_rows = hidden_states.shape
        rows = rows_of(module, batch, num_rows, hidden_states.device, call.keywords, spreads=True)
        x, steps, b, c = (_by_row(t) for t in (hidden_states, _steps(dt, delta_bias), B, C))
        a, skip = A[None], None if D is None else D[None]
        share, name = division.share(num_channels, 1), call.next_scan()
        if (slots := rows.slots(name)) is not None:
            x, steps, a = x[..., share.heads], steps[..., share.heads], a[:, share.heads]
            skip = None if skip is None else skip[:, share.heads]
            y = selective_scan_in_slots(x, steps, a, b, c, skip, rows.cu_seqlens, slots)
            y = share.gathered(y.mT).mT
        else:
            x, steps, b, c = rows.spread(x, steps, b, c)
            y, final = selective_scan(x, steps, a, b, c, skip, rows.cu_seqlens)
            rows.keep(name, final[..., share.heads])
            y = rows.kept(y)
        y = y[:, 0].unflatten(0, (batch, num_rows)).transpose(1, 2)
        return y if z is None else y * silu(z)

    return mamba_selective_scan


def _by_row(x: Tensor) -> Tensor:
    """Return x [B, C, T] as rows of one head, [B * T, 1, C]."""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(1)


def _steps(dt: Tensor, bias: Tensor | None) -> Tensor:
    return softplus(dt if bias is None else dt + bias.to(dt.dtype)[:, None])


@cache
def is_selective_scan(function: Forward) -> bool:
    """Return whether it computes the scan: with a bias of the steps and a gate, and with and without a skip."""
    generator = torch.Generator().manual_seed(0)
    x, dt, z, b, c, a, d, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        for shape in (*[(2, 6, 9)] * 3, *[(2, 5, 9)] * 2, (6, 5), (6,), (6,))
    )
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    for skip, gate in ((d, z), (None, None)):
        named: dict[str, Any] = {"D": skip, "z": gate, "delta_bias": bias, "delta_softplus": True}
        try:
            found = inspect.unwrap(function)(x, dt, -a.exp(), b, c, **named)
        except UNLIKE:
            return False
        flat_x, steps, flat_b, flat_c = (_by_row(t) for t in (x, _steps(dt, bias), b, c))
        skip = None if skip is None else skip[None]
        y = selective_scan(flat_x, steps, -a.exp()[None], flat_b, flat_c, skip, ends)[0]
        expected = y.view(2, 9, 6).transpose(1, 2) * (1.0 if gate is None else silu(gate))
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            return False
        if not torch.allclose(found, expected, atol=1e-5):
            return False
    return True


@cache
def is_inner_shortcut(function: Forward) -> bool:
    """Return whether it is the fusion of a Mamba-1 layer that only packages for GPUs have: without them, None."""
    x = torch.zeros(1, 2, 4, dtype=torch.float32)
    try:
        return inspect.unwrap(function)(x, x[0], None, x[0], x[0], x[0], None, x[0], D=x[0, 0]) is None
    except UNLIKE:
        return False
