"""The gated delta rule of transformers' layers: the recognition of their function, and ours in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.recurrent.delta_rule import gated_delta_rule, gated_delta_rule_in_slots
from .heads import HeadDivision
from .rows import LayerCall, rows_of

Forward = Callable[..., Any]

# Errors that code of another form raises on a trial. It then counts as not recognised.
UNLIKE = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)


def delta_rule_of(module: nn.Module, division: HeadDivision, call: LayerCall) -> Forward:
    """Return the rule for one layer, with the signature of transformers' function and the layer's states."""

    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: object,
    ) -> tuple[Tensor, None]:
        # query and key [B, T, G, K], value [B, T, H, V], g [B, T, H] or [B, T, H, K], beta [B, T, H]
        assert initial_state is None and not output_final_state, "a hosted layer gets no cache"
        batch, num_rows = value.shape[:2]
        rows = rows_of(module, batch, num_rows, value.device, call.keywords, spreads=True)
        q, k, v, decay, rate = (t.flatten(0, 1) for t in (query, key, value, g, beta))
        norm_eps = 1e-6 if use_qk_l2norm_in_kernel else None
        share = division.share(v.shape[1], k.shape[1])
        if (slots := rows.slots("recurrent")) is not None:
            q, k = (t[:, share.key_heads] for t in (q, k))
            v, decay, rate = (t[:, share.heads] for t in (v, decay, rate))
            out = gated_delta_rule_in_slots(q, k, v, decay, rate, rows.cu_seqlens, slots, norm_eps=norm_eps)
            out = share.gathered(out)
        else:
            q, k, v, decay, rate = rows.spread(q, k, v, decay, rate)
            out, final = gated_delta_rule(q, k, v, decay, rate, rows.cu_seqlens, norm_eps=norm_eps)
            rows.keep("recurrent", final[:, share.heads])
            out = rows.kept(out)
        return out.unflatten(0, (batch, num_rows)), None

    return chunk_gated_delta_rule


@cache
def is_delta_rule(function: Forward) -> bool:
    """Return whether it computes the rule with a decay per head."""
    return _is_like(function, (2, 9, 4))


@cache
def is_channel_delta_rule(function: Forward) -> bool:
    """Return whether it computes the rule with a decay per channel."""
    return _is_like(function, (2, 9, 4, 8))


def _is_like(function: Forward, decays: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, v, g, beta = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        for shape in ((2, 9, 4, 8), (2, 9, 4, 8), (2, 9, 4, 6), decays, (2, 9, 4))
    )
    g, beta = -g.abs(), beta.sigmoid()
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    for norm_eps in (1e-6, None):
        named = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": norm_eps is not None}
        size = 1.0 if norm_eps is not None else 0.2  # long keys make the rule itself diverge
        operands = (q * size, k * size, v, g, beta)
        try:
            found = inspect.unwrap(function)(*operands[:3], g=g, beta=beta, **named)
        except UNLIKE:
            return False
        flat: list[Any] = [*(t.flatten(0, 1) for t in operands), ends]
        expected = gated_delta_rule(*flat, norm_eps=norm_eps)[0].view(2, 9, 4, 6)
        if type(found) is not tuple or not isinstance(found[0], Tensor) or found[0].shape != expected.shape:
            return False
        if not torch.allclose(found[0], expected, atol=1e-5):
            return False
    return True
