"""Attention of the same few queries at every position to a few states of that position (the residuals of Inkling 2).

PyTorch may choose a kernel by the number of positions; here each position's result depends on its own states alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[..., Tensor]  # x [...,K], weight [N,K], bias [N] or None -> [...,N]


def shared_query_attention(linear: Linear) -> Callable[..., Tensor]:
    """Return `F.scaled_dot_product_attention` whose result for a position depends on that alone, where its queries are
    one tensor [Q, D] expanded to all positions; other calls are PyTorch's."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        is_plain = attn_mask is None and not dropout_p and not is_causal and not any(others.values())
        if not is_plain or not _is_shared(query) or query.shape[:-2] != key.shape[:-2]:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others
            )
        queries = query[(0,) * (query.dim() - 2)]  # [Q, D]
        scores = linear(key, queries, None) * (query.shape[-1] ** -0.5 if scale is None else scale)  # [..., S, Q]
        probs = torch.softmax(scores.transpose(-1, -2), -1)
        total = probs[..., :1] * value[..., :1, :]
        for state in range(1, value.shape[-2]):  # left to right
            total = total + probs[..., state : state + 1] * value[..., state : state + 1, :]
        return total

    return attention


def _is_shared(query: Tensor) -> bool:
    """Return whether queries [..., Q, D] are the same at every position, as an expanded tensor shows."""
    positions = zip(query.shape[:-2], query.stride()[:-2], strict=True)
    return query.dim() > 2 and all(size == 1 or not stride for size, stride in positions)
