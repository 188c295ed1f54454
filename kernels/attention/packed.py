"""Attention for the trainer: packed sequences, differentiable, with the bits of `paged_attention`.

Dimension letters: N rows, S sequences, H query heads, K KV heads, D key width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .padded import padded_gradients
from .paged import PATHS, attention_path, mismatches, wrong_ends
from .shared_rows import SharedRows
from .step import AttentionPath, RowLayout, ScoreRule


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    row_ends: Tensor | None = None,
    shared: SharedRows | None = None,
    path: AttentionPath | None = None,
) -> Tensor:
    """Compute causal attention within each of S sequences packed in rows; differentiable once in the five tensors.

    query [N,H,D], key [N,K,D], value [N,K,E], query_start [S+1] int32, row_ends [N] int32 as in a `RowLayout` ->
    [N,H,E]; the rest as in `paged_attention`, and the same bits. The backward recomputes probabilities: in tiles on the
    Triton path (`triton_gradients.py`), else in fp32, many sequences at a time, within a fixed budget of memory
    (`padded_attention`). With `shared`, query_start has the offsets of its tokens, of which several may have one of the
    N rows. Raises ValueError naming every argument that does not fit.
    """
    wrong = mismatches(query, key, value, 3, window, softcap, sinks, bias)
    if not wrong and not query.shape[0] == key.shape[0] == value.shape[0]:
        wrong.append(f"query, key and value have {query.shape[0]}, {key.shape[0]} and {value.shape[0]} rows")
    is_offsets = query_start.dtype == torch.int32 and query_start.dim() == 1 and query_start.is_contiguous()
    if not is_offsets or query_start.shape[0] == 0 or query_start.device != query.device:
        wrong.append(
            f"query_start is {query_start.dtype} {list(query_start.shape)} on {query_start.device}, "
            f"not int32 [S + 1], contiguous, on {query.device}"
        )
    wrong += wrong_ends(row_ends, query)
    if shared is not None and shared.num_rows != len(query):
        wrong.append(f"shared has {shared.num_rows} rows, query {len(query)}")
    if shared is not None and row_ends is not None:
        wrong.append("row_ends cannot be given with shared: rows of several sequences see the keys up to their own")
    if wrong:
        raise ValueError("varlen_attention: " + "; ".join(wrong))
    path = path or attention_path(query.device, query.dtype)
    rule = ScoreRule(scale, window, softcap)
    differentiated = [t for t in (query, key, value, sinks, bias) if t is not None and t.requires_grad]
    if differentiated and torch.is_grad_enabled():
        return _VarlenAttention.apply(query, key, value, sinks, bias, query_start, row_ends, shared, rule, path)
    return _attend_packed(path, (query, key, value, sinks, bias), query_start, row_ends, shared, rule)


_Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # query, key, value, sinks, bias


def _attend_packed(
    path: AttentionPath, operands: _Operands, query_start: Tensor, row_ends: Tensor | None, shared: SharedRows | None,
    rule: ScoreRule,
) -> Tensor:  # fmt: skip
    query, key, value, sinks, bias = operands if shared is None else _spread(operands, shared)
    out = PATHS[path](query, key, value, RowLayout(query_start, None, None, row_ends), rule, sinks, bias)
    return out if shared is None else shared.kept(out)


def _spread(operands: _Operands, shared: SharedRows) -> _Operands:
    """Return the operands of all tokens, from those of the rows that they share."""
    query, key, value, sinks, bias = operands
    sinks = shared.spread(sinks) if sinks is not None and sinks.dim() == 2 else sinks
    bias = shared.spread(bias) if bias is not None and bias.dim() == 3 else bias
    return shared.spread(query), shared.spread(key), shared.spread(value), sinks, bias


class _VarlenAttention(torch.autograd.Function):
    """Forward through the chosen kernel, backward in Triton where that is the path, else in plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        query_start: Tensor,
        row_ends: Tensor | None,
        shared: SharedRows | None,
        rule: ScoreRule,
        path: AttentionPath,
    ) -> Tensor:
        out = _attend_packed(path, (query, key, value, sinks, bias), query_start, row_ends, shared, rule)
        kept = [out] if path == "triton" else []
        ctx.save_for_backward(query, key, value, sinks, bias, query_start, row_ends, *kept)
        ctx.rule, ctx.shared = rule, shared
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, bias, query_start, row_ends, *out = ctx.saved_tensors
        operands, shared = (query, key, value, sinks, bias), ctx.shared
        if shared is not None:
            operands, grad_out = _spread(operands, shared), shared.spread_gradient(grad_out)
            out = [shared.spread(rows) for rows in out]
        layout = RowLayout(query_start, None, None, row_ends)
        if out:
            from .triton_gradients import triton_gradients

            grads = triton_gradients(*operands, layout, ctx.rule, out[0], grad_out)
        else:
            grads = padded_gradients(*operands, layout, ctx.rule, grad_out)
        if shared is not None:
            of_rows = (True, True, True, sinks is not None and sinks.dim() == 2, True)
            grads = [
                shared.summed(grad) if grad is not None and is_of_rows else grad
                for grad, is_of_rows in zip(grads, of_rows, strict=True)
            ]
        return *grads, *(None,) * 5
