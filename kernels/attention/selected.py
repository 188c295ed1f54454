"""Attention of rows to selected keys alone: each row is a sequence of its own over a cache in blocks of one key.

So the kernels of `paged.py` serve it unchanged, and a row has the bits of causal attention over its selected keys in
the order of their positions: with all keys selected those of plain attention. Letters as there, M keys of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .paged import attend, paged_attention
from .selection import SelectedKeys
from .step import AttentionPath, NewRows, PagedStep, RowLayout, ScoreRule

_BUDGET = 1 << 22  # numbers of gathered keys that the backward holds at a time


def selected_attention_in_step(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, selected: SelectedKeys, *, new: NewRows, **options: Any
) -> Tensor:
    """Compute attention of a step's rows to their selected keys; not differentiable.

    Tensors, options and errors as in `paged_attention`. `new` is written first.
    """
    layout = selected.layout()
    assert layout.context_lens is not None
    step = PagedStep(selected.places, layout.query_start, layout.context_lens)
    keys, values = (cache.flatten(0, 1)[:, None] for cache in (key_cache, value_cache))
    return paged_attention(query, keys, values, step, new=new, **options)


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: SelectedKeys,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    path: AttentionPath,
) -> Tensor:
    """Compute attention of packed rows [N,H,D] to their selected keys [N,K,D] and values [N,K,E] -> [N,H,E].

    Differentiable once in the four tensors, and the bits of `selected_attention_in_step`. The backward recomputes
    probabilities in fp32 with PyTorch's operations, some rows at a time.
    """
    rule = ScoreRule(scale, None, softcap)
    return _SelectedAttention.apply(query, key, value, sinks, selected.places, selected.counts, rule, path)


class _SelectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, places: Tensor, counts: Tensor,
        rule: ScoreRule, path: AttentionPath,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(query, key, value, sinks, places, counts)
        ctx.rule = rule
        layout: RowLayout = SelectedKeys(places, counts).layout()
        return attend(path, query, key[:, None], value[:, None], layout, rule, sinks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, places, counts = ctx.saved_tensors
        inputs = [t for t in (query, key, value, sinks) if t is not None]
        grads = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in inputs]
        with torch.autocast(query.device.type, enabled=False):  # of a caller whose backward runs inside it
            for rows in _parts(query, key, value, places):
                found = _gradients(query[rows], key, value, sinks, places[rows], counts[rows], ctx.rule, grad_out[rows])
                grads[0][rows] = found[0]
                for grad, part in zip(grads[1:3], found[1:3], strict=True):
                    _add_rows(grad, places[rows].flatten().clamp(0, len(key) - 1), part.flatten(0, 1))
                if sinks is not None:
                    grads[3] += found[3]
        results = [grad.to(t.dtype) for grad, t in zip(grads, inputs, strict=True)]
        return *results, *(None,) * (8 - len(results))


def _parts(query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Iterator[slice]:
    """Yield slices of the rows whose gathered keys and scores fit the budget."""
    heads = max(key.shape[1] * (key.shape[2] + value.shape[2]), query.shape[1])
    at_once = max(1, _BUDGET // (heads * places.shape[1]))
    for first in range(0, len(query), at_once):
        yield slice(first, first + at_once)


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, places: Tensor, counts: Tensor, rule: ScoreRule,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of n rows in fp32: of query [n,H,D], of their keys [n,M,K,D] and values [n,M,K,E], of sinks."""
    (num_rows, num_heads, width), num_kv_heads = query.shape, key.shape[1]
    real = torch.arange(places.shape[1], device=query.device) < counts[:, None]  # [n, M]
    index = places.clamp(0, len(key) - 1)
    keys, values = (t[index].float().transpose(1, 2) for t in (key, value))  # [n, K, M, D or E]
    grouped = query.float().view(num_rows, num_kv_heads, -1, width)
    grad = grad_out.float().view(num_rows, num_kv_heads, -1, value.shape[-1])
    scores = grouped @ keys.transpose(2, 3) * rule.scale  # [n, K, G, M]
    tanh = None
    if rule.softcap is not None:
        tanh = torch.tanh(scores / rule.softcap)
        scores = tanh * rule.softcap
    scores = scores.masked_fill(~real[:, None, None], -torch.inf)
    sink = scores.new_full((*scores.shape[:3], 1), -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, num_kv_heads, -1, 1).expand_as(sink)
    probs = torch.softmax(torch.cat([scores, sink], -1), -1)
    probs, of_sink = probs[..., :-1], probs[..., -1]
    grad_values = probs.transpose(2, 3) @ grad
    grad_scores = grad @ values.transpose(2, 3)
    delta = (probs * grad_scores).sum(-1, keepdim=True)
    grad_scores = (grad_scores - delta) * probs
    if tanh is not None:
        grad_scores = grad_scores * (1 - tanh.square())
    grad_scores = grad_scores * rule.scale
    return (
        (grad_scores @ keys).view(num_rows, num_heads, width),
        (grad_scores.transpose(2, 3) @ grouped).transpose(1, 2),
        grad_values.transpose(1, 2),
        -(of_sink * delta[..., 0]).sum(0).flatten(),
    )


def _add_rows(total: Tensor, rows: Tensor, parts: Tensor) -> None:
    """Add parts to rows of a tensor, some rows several times, in one order on any device."""
    if total.is_cuda:
        total.index_put_((rows,), parts, accumulate=True)  # sorts first; index_add_ adds in the order of its threads
    else:
        total.index_add_(0, rows, parts)
