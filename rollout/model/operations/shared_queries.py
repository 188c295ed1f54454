"""Attention of the same few queries at every position to a few states of that position (the residuals of Inkling 2).

PyTorch may choose a kernel by the number of positions; here each position's result depends on its own states alone.
The module's code calls PyTorch's function or, since transformers 5.24, the attention interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHARED_QUERIES = "lockstep_shared_queries"  # attribute of a module that `makes_no_queries`: the attention of its place

Linear = Callable[..., Tensor]  # x [...,K], weight [N,K], bias [N] or None -> [...,N]


def shared_query_attention(linear: Linear) -> Callable[..., Tensor]:
    """Return `F.scaled_dot_product_attention` whose result for a position depends on that alone, where its queries are
    one tensor [Q, D] expanded to all positions; other calls are PyTorch's."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        is_plain = attn_mask is None and not dropout_p and not is_causal and not any(others.values())
        if not is_plain or not are_shared(query, key):
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


def makes_no_queries(module: nn.Module) -> bool:
    """Return whether a module calls the attention interface outside of any layer and makes no queries of rows: it has
    parameters of its own, and no products."""
    if getattr(module, "is_causal", None) is not False or hasattr(module, "layer_idx"):
        return False
    return any(True for _ in module.parameters(recurse=False)) and not any(_is_product(m) for m in module.children())


def are_shared(query: Tensor, key: Tensor) -> bool:
    """Return whether queries [..., Q, D] are the same at every position of keys [..., S, D], as an expanded tensor
    shows."""
    positions = zip(query.shape[:-2], query.stride()[:-2], strict=True)
    same = query.dim() > 2 and all(size == 1 or not stride for size, stride in positions)
    return same and query.shape[:-2] == key.shape[:-2]


def _is_product(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())
