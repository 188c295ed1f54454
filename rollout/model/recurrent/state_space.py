"""The state space scan of transformers' Mamba-2 layers: the recognition of their function, and ours in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.layers.activation import softplus
from ....kernels.recurrent.state_space import state_space, state_space_in_slots
from .delta_rule import UNLIKE
from .heads import HeadDivision
from .rows import LayerCall, rows_of

Forward = Callable[..., Any]

_NO_LIMIT = (0.0, float("inf"))


def state_space_of(module: nn.Module, division: HeadDivision, call: LayerCall) -> Forward:
    """Return the scan for one layer, with the signature of transformers' function and the layer's states."""

    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _NO_LIMIT,
        return_final_states: bool = False,
        z: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        # hidden_states [B, T, H, P], dt [B, T, H], A and D [H], B and C [B, T, G, N]
        assert initial_states is None and not return_final_states, "a hosted layer gets no cache"
        if not dt_softplus or z is not None:
            raise ValueError(f"{type(module).__name__}: a scan with a gate, or without softplus, is not supported")
        batch, num_rows = hidden_states.shape[:2]
        rows = rows_of(module, batch, num_rows, hidden_states.device, call.keywords, spreads=True)
        steps = _steps(dt, dt_bias, dt_limit)
        x, steps, b, c = (t.flatten(0, 1) for t in (hidden_states, steps, B, C))
        share = division.share(x.shape[1], b.shape[1])
        if (slots := rows.slots("recurrent")) is not None:
            x, steps, b, c = x[:, share.heads], steps[:, share.heads], b[:, share.key_heads], c[:, share.key_heads]
            skip = None if D is None else D[share.heads]
            out = share.gathered(state_space_in_slots(x, steps, A[share.heads], b, c, skip, rows.cu_seqlens, slots))
        else:
            x, steps, b, c = rows.spread(x, steps, b, c)
            out, final = state_space(x, steps, A, b, c, D, rows.cu_seqlens)
            rows.keep("recurrent", final[:, share.heads])
            out = rows.kept(out)
        return out.unflatten(0, (batch, num_rows))

    return mamba2_chunk_scan


def _steps(dt: Tensor, bias: Tensor | None, limit: tuple[float, float]) -> Tensor:
    dt = softplus(dt if bias is None else dt + bias.to(dt.dtype))
    return dt if tuple(limit) == _NO_LIMIT else dt.clamp(*limit)


@cache
def is_state_space(function: Forward) -> bool:
    """Return whether it computes the scan: with groups, a bias and limits of the steps, and with and without a skip."""
    generator = torch.Generator().manual_seed(0)
    x, dt, b, c, a, d, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        for shape in ((2, 9, 4, 6), (2, 9, 4), (2, 9, 2, 5), (2, 9, 2, 5), (4,), (4,), (4,))
    )
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    for skip, limit in ((d, _NO_LIMIT), (None, (0.5, 0.9))):
        named = {"D": skip, "dt_bias": bias, "dt_softplus": True, "dt_limit": limit, "z": None}
        try:
            found = inspect.unwrap(function)(x, dt, -a.exp(), b, c, chunk_size=4, **named)
        except UNLIKE:
            return False
        flat_x, steps, flat_b, flat_c = (t.flatten(0, 1) for t in (x, _steps(dt, bias, limit), b, c))
        expected = state_space(flat_x, steps, -a.exp(), flat_b, flat_c, skip, ends)[0].view(2, 9, 4, 6)
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            return False
        if not torch.allclose(found, expected, atol=1e-5):
            return False
    return True


@cache
def is_shortcut(function: Forward) -> bool:
    """Return whether it is the fusion of a Mamba-2 layer that only packages for GPUs have: without them, None."""
    x = torch.zeros(1, 2, 4, dtype=torch.float32)
    try:
        return inspect.unwrap(function)(x, x[0, :, :2], None, x[0, 0], x[0, 0], D=x[0, 0], chunk_size=2) is None
    except UNLIKE:
        return False


def without_shortcut(module: nn.Module, division: HeadDivision, call: LayerCall) -> Forward:
    """Return a function that declines the shortcut, so the layer takes its own steps."""
    return lambda *_, **__: None
