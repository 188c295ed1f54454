"""Gradients of packed causal attention on a GPU (Triton), without a matrix of scores and without a read on the host.

After FlashAttention-2 (Dao 2023): one kernel for queries, whose programs hold a tile of (row, query head) pairs and
walk its keys twice, for the sum of the softmax and then for the gradient; and one for keys and values, whose programs
hold a tile of keys and walk the rows that see them. Probabilities are computed again, from each row's log-sum. Every
gradient is written by one program, so nothing depends on an order of additions between programs.

Dimension letters: N rows, S sequences, H query heads, K KV heads, G = H / K, D key width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import INTERPRETED, dot_added, rounded
from .step import RowLayout, ScoreRule
from .triton_kernels import SERVED, sequence_of
from .triton_softmax import LOG2E, near_keys

_SIZES = ["num_sequences", "num_heads", "group", "window", "sink_row", "bias_row", "reach"]


def triton_gradients(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, bias: Tensor | None, layout: RowLayout,
    rule: ScoreRule, out: Tensor, grad_out: Tensor,
) -> list[Tensor | None]:  # fmt: skip
    """Compute the gradients of query [N,H,D], key [N,K,D], value [N,K,E], sinks [H] or [N,H] and bias [N,H,R], in their
    dtypes. A bias [H,R] of all rows has none.

    layout: of packed rows. out and grad_out [N,H,E]: the result of the forward and its gradient. Sums are float32.
    """
    query_start, row_ends = layout.query_start, layout.row_ends
    if query.dtype not in SERVED or not (query.is_cuda or INTERPRETED.value):
        raise ValueError(f"Triton's gradients serve floats of 16 and 32 bits on a GPU, not {query.dtype}")
    query, key, value, out, grad_out = (each.contiguous() for each in (query, key, value, out, grad_out))
    grads = [torch.empty_like(each) for each in (query, key, value)]
    # A row writes those of the keys that it sees.
    of_bias = torch.zeros_like(bias) if bias is not None and bias.dim() == 3 else None
    (num_rows, num_heads, width), num_sequences = query.shape, len(query_start) - 1
    if not query.numel():
        return [*grads, None if sinks is None else torch.zeros_like(sinks), of_bias]
    num_kv_heads, value_width, group = key.shape[1], value.shape[-1], num_heads // key.shape[1]
    log_sums, deltas, of_sinks = (query.new_empty(num_rows, num_heads, dtype=torch.float32) for _ in range(3))
    of_queries, of_keys = _tiles(query.dtype, max(width, value_width))
    numbers: dict[str, Any] = {
        "num_sequences": num_sequences, "num_heads": num_heads, "group": group, "window": rule.window or 0,
        "scale": rule.scale, "softcap": rule.softcap or 0.0, "HAS_WINDOW": rule.window is not None,
        "HAS_SOFTCAP": rule.softcap is not None, "D": width, "E": value_width, "HAS_BIAS": bias is not None,
        "bias": query if bias is None else bias, "reach": 0 if bias is None else bias.shape[-1],
        "HAS_ENDS": row_ends is not None, "row_ends": query_start if row_ends is None else row_ends,
        "bias_row": bias.stride(0) if bias is not None and bias.dim() == 3 else 0,
        "D_PAD": max(16, triton.next_power_of_2(width)), "E_PAD": max(16, triton.next_power_of_2(value_width)),
    }  # fmt: skip
    inputs = (query, key, value, grad_out)
    with torch.cuda.device_of(query):
        _query_kernel[(num_rows * group // of_queries["ROWS"] + num_sequences, num_kv_heads)](
            *(*inputs, out, query if sinks is None else sinks.float().contiguous(), query_start),
            *(grads[0], log_sums, deltas, of_sinks), HAS_SINKS=sinks is not None, **numbers, **of_queries,
            grad_bias=query if of_bias is None else of_bias, HAS_BIAS_GRAD=of_bias is not None,
            sink_row=num_heads if sinks is not None and sinks.dim() == 2 else 0,
        )  # fmt: skip
        _key_kernel[(num_rows // of_keys["KEYS"] + num_sequences, num_kv_heads)](
            *(*inputs, query_start, log_sums, deltas, grads[1], grads[2]), **numbers, **of_keys,
            first_rows=query_start if row_ends is None else _first_rows(row_ends, query_start),
        )  # fmt: skip
    if sinks is None:
        return [*grads, None, of_bias]
    return [*grads, (of_sinks.sum(0) if sinks.dim() == 1 else of_sinks).to(sinks.dtype), of_bias]


def _first_rows(row_ends: Tensor, query_start: Tensor) -> Tensor:
    """Return the first row that sees each key, both counted over all sequences: int32 [N]."""
    rows = torch.arange(len(row_ends), dtype=torch.int32, device=row_ends.device)
    sequence = torch.searchsorted(query_start, rows, right=True) - 1
    return torch.searchsorted(query_start[sequence] + row_ends, rows, right=True).to(torch.int32)


def _tiles(dtype: torch.dtype, width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiles and warps of the two kernels; width: the larger of D and E.

    A tile that stays in a program has the 64 rows of Hopper's instructions, and the one that passes by has fewer.
    """
    if dtype == torch.float32:  # no tensor cores
        of_queries = {"ROWS": 16, "KEYS": 16, "num_warps": 4, "num_stages": 2}
        return of_queries, of_queries
    passing = 32 if width > 64 else 64
    of_queries = {"ROWS": 64, "KEYS": passing, "num_warps": 4, "num_stages": 2}
    return of_queries, {"ROWS": 32, "KEYS": 64, "num_warps": 8, "num_stages": 2}


@triton.jit
def _scores(left, right, is_seen, near, scale, softcap, HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Compute the scores of rows and keys in log2, either to the left, -inf where not seen, and the slopes of their
    dot products, without the scale."""
    score = dot_added(tl.zeros(is_seen.shape, tl.float32), left, tl.trans(right)) * scale
    slope = tl.full(score.shape, 1.0, tl.float32)
    if HAS_SOFTCAP:
        tanh = 1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E) / softcap) + 1.0)
        score = softcap * tanh
        slope = 1.0 - tanh * tanh
    if HAS_BIAS:
        score = score + near
    return tl.where(is_seen, score * LOG2E, float("-inf")), slope


@triton.jit
def _seen(position, last_key, other, num_rows, window, HAS_WINDOW: tl.constexpr):
    """Return whether the row at `position` of a sequence, which sees keys up to `last_key`, sees the key at `other`;
    shapes broadcast."""
    is_seen = (other <= last_key) & (other < num_rows)
    if HAS_WINDOW:
        is_seen = is_seen & (other > position - window)
    return is_seen


@triton.jit
def _tile_of(tensor, at, is_there, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Load rows [R, PAD] that begin at elements `at`; zeros where there is none."""
    c = tl.arange(0, PAD)
    return tl.load(tensor + at[:, None] + c[None, :], mask=is_there[:, None] & (c < WIDTH)[None, :], other=0.0)


@triton.jit
def _store_tile(tensor, at, is_there, rows, WIDTH: tl.constexpr, PAD: tl.constexpr):
    c = tl.arange(0, PAD)
    value = rounded(rows, tensor.dtype.element_ty)
    tl.store(tensor + at[:, None] + c[None, :], value, mask=is_there[:, None] & (c < WIDTH)[None, :])


@triton.jit(do_not_specialize=_SIZES)
def _query_kernel(
    query, key, value, grad_out, out, sinks, query_start, grad_query, log_sums, deltas, of_sinks, bias, grad_bias,
    row_ends, num_sequences, num_heads, group, window, sink_row, bias_row, reach, scale, softcap,
    HAS_ENDS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BIAS_GRAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of (row, query head) pairs and of their bias, and each row's log-sum (log2), delta
    and sink part."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(tile, query_start, num_sequences, group, ROWS)
    start = tl.load(query_start + s)
    num_rows = tl.load(query_start + s + 1) - start
    first_pair = (tile - (start * group // ROWS + s)) * ROWS
    if first_pair >= num_rows * group:
        return
    pair = first_pair + tl.arange(0, ROWS)
    is_real = pair < num_rows * group
    position = pair // group
    head = kv_head * group + pair % group
    at = (start + position).to(tl.int64) * num_heads + head
    q = _tile_of(query, at * D, is_real, D, D_PAD)
    grad = _tile_of(grad_out, at * E, is_real, E, E_PAD)
    delta = tl.sum(grad.to(tl.float32) * _tile_of(out, at * E, is_real, E, E_PAD).to(tl.float32), 1)
    kv_heads = num_heads // group
    end = tl.minimum((first_pair + ROWS - 1) // group + 1, num_rows)
    last_key = position  # and no sum: without ends the kernel has no register to spare
    if HAS_ENDS:
        last_key = tl.load(row_ends + start + position, mask=is_real, other=0) - 1
        end = tl.max(last_key, 0) + 1
    first_key = tile * 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_pair // group - window + 1, 0) // KEYS * KEYS
    bias_at = (start + position).to(tl.int64) * bias_row + head * reach
    of_real = tl.where(is_real, reach, 0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(first_key, end, KEYS):
        other = first + tl.arange(0, KEYS)
        key_at = ((start + other).to(tl.int64) * kv_heads + kv_head) * D
        k = _tile_of(key, key_at, other < num_rows, D, D_PAD)
        is_seen = _seen(position[:, None], last_key[:, None], other[None, :], num_rows, window, HAS_WINDOW)
        near = 0.0
        if HAS_BIAS:
            near = near_keys(bias, bias_at[:, None], of_real[:, None], position[:, None] - other[None, :])
        score, _ = _scores(q, k, is_seen, near, scale, softcap, HAS_SOFTCAP, HAS_BIAS)
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(score - base[:, None]), 1)
        top = new_top
    if HAS_SINKS:
        sink_at = (start + position).to(tl.int64) * sink_row + head
        sink = tl.load(sinks + sink_at, mask=is_real, other=0.0) * LOG2E
        new_top = tl.maximum(top, sink)
        total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        top = new_top
    log_sum = tl.where(is_real, top + tl.log2(total), 0.0)
    tl.store(log_sums + at, log_sum, mask=is_real)
    tl.store(deltas + at, delta, mask=is_real)
    if HAS_SINKS:
        tl.store(of_sinks + at, -tl.exp2(sink - log_sum) * delta, mask=is_real)
    total_grad = tl.zeros((ROWS, D_PAD), tl.float32)
    for first in range(first_key, end, KEYS):
        other = first + tl.arange(0, KEYS)
        is_key = other < num_rows
        key_at = (start + other).to(tl.int64) * kv_heads + kv_head
        k = _tile_of(key, key_at * D, is_key, D, D_PAD)
        v = _tile_of(value, key_at * E, is_key, E, E_PAD)
        is_seen = (
            _seen(position[:, None], last_key[:, None], other[None, :], num_rows, window, HAS_WINDOW) & is_real[:, None]
        )
        distance = position[:, None] - other[None, :]
        near = 0.0
        if HAS_BIAS:
            near = near_keys(bias, bias_at[:, None], of_real[:, None], distance)
        score, slope = _scores(q, k, is_seen, near, scale, softcap, HAS_SOFTCAP, HAS_BIAS)
        prob = tl.exp2(score - log_sum[:, None])
        of_prob = dot_added(tl.zeros((ROWS, KEYS), tl.float32), grad, tl.trans(v))
        of_score = prob * (of_prob - delta[:, None])
        if HAS_BIAS_GRAD:
            of_near = rounded(of_score, grad_bias.dtype.element_ty)
            is_near = is_seen & (distance < reach)
            if HAS_ENDS:  # keys behind the row have no number; without ends none is seen, and registers are scarce
                is_near = is_near & (distance >= 0)
            tl.store(grad_bias + bias_at[:, None] + distance, of_near, mask=is_near)
        of_score = of_score * slope * scale
        total_grad = dot_added(total_grad, rounded(of_score, k.dtype), k)
    _store_tile(grad_query, at * D, is_real, total_grad, D, D_PAD)


@triton.jit(do_not_specialize=_SIZES)
def _key_kernel(
    query, key, value, grad_out, query_start, log_sums, deltas, grad_key, grad_value, bias,
    row_ends, first_rows, num_sequences, num_heads, group, window, bias_row, reach, scale, softcap,
    HAS_ENDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values from all (row, query head) pairs that see it."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(tile, query_start, num_sequences, 1, KEYS)
    start = tl.load(query_start + s)
    num_rows = tl.load(query_start + s + 1) - start
    first = (tile - (start // KEYS + s)) * KEYS
    if first >= num_rows:
        return
    other = first + tl.arange(0, KEYS)
    is_key = other < num_rows
    key_at = (start + other).to(tl.int64) * (num_heads // group) + kv_head
    k = _tile_of(key, key_at * D, is_key, D, D_PAD)
    v = _tile_of(value, key_at * E, is_key, E, E_PAD)
    last = num_rows
    if HAS_WINDOW:
        last = tl.minimum(first + KEYS + window - 1, num_rows)
    first_row = first  # that sees one of the keys
    if HAS_ENDS:
        first_row = tl.load(first_rows + start + first) - start
    of_key = tl.zeros((KEYS, D_PAD), tl.float32)
    of_value = tl.zeros((KEYS, E_PAD), tl.float32)
    for first_pair in range(first_row * group, last * group, ROWS):
        pair = first_pair + tl.arange(0, ROWS)
        is_real = pair < num_rows * group
        position = pair // group
        last_key = position
        if HAS_ENDS:
            last_key = tl.load(row_ends + start + position, mask=is_real, other=0) - 1
        at = (start + position).to(tl.int64) * num_heads + kv_head * group + pair % group
        q = _tile_of(query, at * D, is_real, D, D_PAD)
        grad = _tile_of(grad_out, at * E, is_real, E, E_PAD)
        log_sum = tl.load(log_sums + at, mask=is_real, other=0.0)
        delta = tl.load(deltas + at, mask=is_real, other=0.0)
        is_seen = (
            _seen(position[None, :], last_key[None, :], other[:, None], num_rows, window, HAS_WINDOW) & is_real[None, :]
        )
        near = 0.0
        if HAS_BIAS:
            of_real = tl.where(is_real, reach, 0)
            bias_at = (start + position).to(tl.int64) * bias_row + (kv_head * group + pair % group) * reach
            near = near_keys(bias, bias_at[None, :], of_real[None, :], position[None, :] - other[:, None])
        score, slope = _scores(k, q, is_seen, near, scale, softcap, HAS_SOFTCAP, HAS_BIAS)
        prob = tl.exp2(score - log_sum[None, :])
        of_value = dot_added(of_value, rounded(prob, grad.dtype), grad)
        of_prob = dot_added(tl.zeros((KEYS, ROWS), tl.float32), v, tl.trans(grad))
        of_score = prob * (of_prob - delta[None, :]) * slope * scale
        of_key = dot_added(of_key, rounded(of_score, q.dtype), q)
    _store_tile(grad_key, key_at * D, is_key, of_key, D, D_PAD)
    _store_tile(grad_value, key_at * E, is_key, of_value, E, E_PAD)
