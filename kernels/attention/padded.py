"""Causal attention in plain PyTorch, on any device: the naive reference, an invariant forward and the
backward.

Sequences are gathered side by side, padded, and multiplied as batches; a long sequence is cut into runs of
its rows. A piece never holds more scores than `score_budget`, so memory stays bounded (about six fp32 tensors
of that size). A row's bits do not depend on the piece that holds it, by the rule measured for CPU matrix
products: rows padded to a multiple of 16 (measured: AMD's need 4, Intel's with AMX 8), keys to a
multiple of 16, values added in blocks of 128 keys from left to right, all in fp32.

Dimension letters: N rows of a step, S sequences, P sequences in a piece, T rows of one, L keys (padded), H
query heads, K KV heads, G = H / K, D key width, E value width.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .step import RowLayout, ScoreRule, ends_fit, refuse_layout

ROW_MULTIPLE = 16
KEY_MULTIPLE = 16
VALUE_BLOCK = 128


@dataclass(frozen=True)
class RowPiece:
    """Rows [first_row, first_row + num_rows) of each of these sequences, as far as it has them."""

    sequences: tuple[int, ...]
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Gathered:
    """One piece as batched operands. Padding repeats the last row and the last key: finite, and masked."""

    query: Tensor  # [P * K, G * T, D] fp32
    key: Tensor  # [P * K, L, D] fp32
    value: Tensor  # [P * K, L, E] fp32
    seen: Tensor  # [P, 1, T, L] bool
    positions: Tensor  # [P, T] of the rows
    rows: Tensor  # [P, T] row of the step
    row_is_real: Tensor  # [P, T] bool
    key_is_real: Tensor  # [P, L] bool

    def distances(self, num_heads: int, reach: int) -> tuple[Tensor, Tensor]:
        """Return each key's distance to the row, bounded to [0, reach), and whether it was there: [P, H, T, L]."""
        distance = self.positions[:, None, :, None] - torch.arange(self.key.shape[1], device=self.positions.device)
        is_near = (distance >= 0) & (distance < reach)
        return distance.clamp(0, reach - 1).expand(-1, num_heads, -1, -1), is_near


def score_budget(device: torch.device) -> int:
    """Return the most scores of one piece: they fill a few caches of a CPU, or a whole GPU."""
    return 1 << 21 if device.type == "cpu" else 1 << 26


def plan_pieces(rows: list[int], contexts: list[int], num_heads: int, group: int, budget: int) -> Iterator[RowPiece]:
    """Pack sequences of similar size together and cut sequences that alone exceed the budget.

    Every row is in exactly one piece.
    """
    order = sorted((s for s, count in enumerate(rows) if count), key=lambda s: (rows[s], contexts[s]))
    batch: list[int] = []
    longest = 0
    for s in order:
        grown = max(longest, contexts[s])
        too_many = (len(batch) + 1) * num_heads * padded_rows(rows[s], group) * padded_keys(grown) > budget
        if batch and (too_many or rows[s] > 2 * rows[batch[0]] + 16):
            yield RowPiece(tuple(batch), 0, rows[batch[-1]])
            batch, grown = [], contexts[s]
        height = max(ROW_MULTIPLE, budget // (num_heads * padded_keys(contexts[s])))
        if height < rows[s]:
            for first in range(0, rows[s], height):
                yield RowPiece((s,), first, min(height, rows[s] - first))
        else:
            batch.append(s)
            longest = grown
    if batch:
        yield RowPiece(tuple(batch), 0, rows[batch[-1]])


def padded_rows(num_rows: int, group: int) -> int:
    """Return the smallest T >= num_rows with G * T a multiple of ROW_MULTIPLE."""
    step = ROW_MULTIPLE // math.gcd(group, ROW_MULTIPLE)
    return -(-num_rows // step) * step


def padded_keys(num_keys: int) -> int:
    return -(-num_keys // KEY_MULTIPLE) * KEY_MULTIPLE


def gather_piece(
    piece: RowPiece,
    query: Tensor,
    starts: list[int],
    rows: list[int],
    contexts: list[int],
    fetch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    num_kv_heads: int,
    rule: ScoreRule,
    row_ends: Tensor | None,
) -> Gathered:
    """Gather a piece's operands; `fetch(sequences [P], positions [P,L])` gives keys [P,L,K,D], values [P,L,K,E]."""
    num_heads, width = query.shape[1:]
    group = num_heads // num_kv_heads

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=query.device)[:, None]

    counts = [min(rows[s] - piece.first_row, piece.num_rows) for s in piece.sequences]
    first_positions = [contexts[s] - rows[s] + piece.first_row for s in piece.sequences]
    num_keys = [first + count for first, count in zip(first_positions, counts, strict=True)]
    if row_ends is not None:
        last_rows = [starts[s] + piece.first_row + count - 1 for s, count in zip(piece.sequences, counts, strict=True)]
        num_keys = row_ends[last_rows].tolist()
    offset = torch.arange(padded_rows(piece.num_rows, group), device=query.device)[None]
    real_offset = torch.minimum(offset, column(counts) - 1)
    row_index = column([starts[s] + piece.first_row for s in piece.sequences]) + real_offset
    position = (column(first_positions) + real_offset)[:, :, None]
    other = torch.arange(padded_keys(max(num_keys)), device=query.device)[None]
    seen = other[:, None] <= position if row_ends is None else other[:, None] < row_ends[row_index][:, :, None]
    if rule.window is not None:
        seen = seen & (other[:, None] > position - rule.window)
    key, value = fetch(column(list(piece.sequences))[:, 0], torch.minimum(other, column(num_keys) - 1))
    num_rows = offset.shape[1]
    return Gathered(
        query=_group_heads(query[row_index], num_kv_heads, num_rows),
        key=key.transpose(1, 2).float().reshape(-1, other.shape[1], width),
        value=value.transpose(1, 2).float().reshape(-1, other.shape[1], value.shape[-1]),
        seen=seen[:, None],
        positions=position[:, :, 0],
        rows=row_index,
        row_is_real=offset < column(counts),
        key_is_real=other < column(num_keys),
    )


def _group_heads(rows: Tensor, num_kv_heads: int, num_rows: int) -> Tensor:
    """Reshape [P,T,H,D] -> [P*K, G*T, D] in fp32."""
    width = rows.shape[-1]
    grouped = rows.float().reshape(rows.shape[0], num_rows, num_kv_heads, -1, width)
    return grouped.permute(0, 2, 3, 1, 4).reshape(rows.shape[0] * num_kv_heads, -1, width)


def _ungroup_heads(rows: Tensor, num_sequences: int, num_rows: int) -> Tensor:
    """Reshape [P*K, G*T, E] -> [P,T,H,E]."""
    grouped = rows.reshape(num_sequences, -1, num_rows, rows.shape[-1])
    return grouped.transpose(1, 2)


@dataclass(frozen=True)
class Softmax:
    probs: Tensor  # [P * K, G * T, L] fp32, exact zeros where not seen
    sink_probs: Tensor | None  # [P, H, T]
    tanh: Tensor | None  # tanh(score / softcap), shape of probs; for the backward


def softmax_scores(piece: Gathered, rule: ScoreRule, sinks: Tensor | None, bias: Tensor | None) -> Softmax:
    num_pieces, _, num_rows, num_keys = piece.seen.shape
    scores = torch.bmm(piece.query, piece.key.transpose(1, 2)).mul_(rule.scale)
    tanh = None
    if rule.softcap is not None:
        tanh = torch.tanh(scores / rule.softcap)
        scores = tanh * rule.softcap
    by_head = scores.view(num_pieces, -1, num_rows, num_keys)
    if bias is not None:
        near = bias[..., :num_keys].float()
        if bias.dim() == 3:
            near = near[piece.rows].transpose(1, 2)  # [P, H, T, up to L distances]
        else:
            near = near[None, :, None].expand(num_pieces, -1, num_rows, -1)
        index, is_near = piece.distances(*near.shape[1::2])
        by_head = by_head + near.gather(3, index) * is_near
    by_head = by_head.masked_fill(~piece.seen, -math.inf)
    if sinks is None:
        return Softmax(torch.softmax(by_head, dim=-1).view_as(scores), None, tanh)
    # The sink is in the first of sixteen columns, so that a longer row still grows only by -inf at its end.
    column = by_head.new_full((num_pieces, by_head.shape[1], num_rows, KEY_MULTIPLE), -math.inf)
    column[..., 0] = sinks.float()[:, None] if sinks.dim() == 1 else sinks[piece.rows].float().transpose(1, 2)
    probs = torch.softmax(torch.cat([column, by_head], dim=-1), dim=-1)
    return Softmax(probs[..., KEY_MULTIPLE:].reshape(scores.shape), probs[..., 0], tanh)


def attend_piece(piece: Gathered, rule: ScoreRule, sinks: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute output rows [P,T,H,E] fp32 of a piece, padding rows included."""
    probs = softmax_scores(piece, rule, sinks, bias).probs
    total = None
    for first in range(0, probs.shape[-1], VALUE_BLOCK):
        block = slice(first, first + VALUE_BLOCK)
        partial = torch.bmm(probs[..., block].contiguous(), piece.value[:, block].contiguous())
        total = partial if total is None else total + partial
    assert total is not None
    return _ungroup_heads(total, piece.rows.shape[0], piece.rows.shape[1])


@dataclass(frozen=True)
class PieceGradients:
    query: Tensor  # [P,T,H,D] fp32
    key: Tensor  # [P,L,K,D] fp32
    value: Tensor  # [P,L,K,E] fp32
    sinks: Tensor | None  # [P,T,H] fp32
    bias: Tensor | None  # [P,T,H,R] fp32; None for one of all rows, which has no gradient


def piece_gradients(
    piece: Gathered, grad_out: Tensor, rule: ScoreRule, sinks: Tensor | None, bias: Tensor | None, num_kv_heads: int
) -> PieceGradients:
    """Compute gradients of a piece from the gradients of all output rows [N,H,E]; recomputes probabilities in fp32."""
    num_pieces, num_rows = piece.rows.shape
    softmax = softmax_scores(piece, rule, sinks, bias)
    probs = softmax.probs
    # Padding rows repeat a real row, so their part of every gradient is set to zero here.
    grad = _group_heads(grad_out[piece.rows] * piece.row_is_real[..., None, None], num_kv_heads, num_rows)
    grad_value = torch.bmm(probs.transpose(1, 2), grad)
    grad_scores = torch.bmm(grad, piece.value.transpose(1, 2))
    delta = (probs * grad_scores).sum(dim=-1, keepdim=True)
    grad_scores.sub_(delta).mul_(probs)
    grad_bias = None
    if bias is not None and bias.dim() == 3:
        by_head = grad_scores.view(num_pieces, -1, num_rows, grad_scores.shape[-1])
        index, is_near = piece.distances(by_head.shape[1], bias.shape[2])
        grad_bias = by_head.new_zeros(*by_head.shape[:3], bias.shape[2])
        grad_bias = grad_bias.scatter_add_(3, index, by_head * is_near).transpose(1, 2)
    if softmax.tanh is not None:
        grad_scores.mul_(1 - softmax.tanh.square())
    grad_scores.mul_(rule.scale)
    grad_sinks = None
    if softmax.sink_probs is not None:
        grad_sinks = -(softmax.sink_probs * delta.view(num_pieces, -1, num_rows)).transpose(1, 2)

    def by_key(rows: Tensor) -> Tensor:
        return rows.view(num_pieces, num_kv_heads, *rows.shape[1:]).transpose(1, 2)

    return PieceGradients(
        query=_ungroup_heads(torch.bmm(grad_scores, piece.key), num_pieces, num_rows),
        key=by_key(torch.bmm(grad_scores.transpose(1, 2), piece.query)),
        value=by_key(grad_value),
        sinks=grad_sinks,
        bias=grad_bias,
    )


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, rule: ScoreRule, sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    for _, piece in _pieces(query, key, value, layout, rule):
        result = attend_piece(piece, rule, sinks, bias)
        out[piece.rows[piece.row_is_real]] = result[piece.row_is_real].to(out.dtype)
    return out


def _pieces(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, rule: ScoreRule
) -> Iterator[tuple[RowPiece, Gathered]]:
    """Yield (RowPiece, Gathered) until each row of the step was in one."""
    starts = layout.query_start.tolist()
    rows = [end - start for start, end in pairwise(starts)]
    contexts = rows if layout.context_lens is None else layout.context_lens.tolist()
    _check_on_host(starts, rows, contexts, query, key, layout)
    start_of = layout.query_start.to(torch.int64)

    def fetch(sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if layout.block_tables is None:
            packed = start_of[sequences][:, None] + positions
            return key[packed], value[packed]
        block_size = key.shape[1]
        blocks = layout.block_tables[sequences[:, None], positions // block_size].to(torch.int64)
        return key[blocks, positions % block_size], value[blocks, positions % block_size]

    num_heads, num_kv_heads = query.shape[1], key.shape[-2]
    group = num_heads // num_kv_heads
    for piece in plan_pieces(rows, contexts, num_heads, group, score_budget(query.device)):
        yield piece, gather_piece(piece, query, starts, rows, contexts, fetch, num_kv_heads, rule, layout.row_ends)


def _check_on_host(
    starts: list[int], rows: list[int], contexts: list[int], query: Tensor, key: Tensor, layout: RowLayout
) -> None:
    """Make the checks that the native kernel makes by itself."""
    if starts[0] != 0 or starts[-1] != query.shape[0]:
        refuse_layout(-1, layout, query.shape[0])
    tables = layout.block_tables
    for s, (count, context) in enumerate(zip(rows, contexts, strict=True)):
        fits = 0 <= count <= context
        if fits and tables is not None:
            used = tables[s, : -(-context // key.shape[1])]
            fits = context <= tables.shape[1] * key.shape[1]
            fits = fits and (not used.numel() or bool((used >= 0).all() & (used < key.shape[0]).all()))
        if not fits or not ends_fit(layout, starts[s], count, context):
            refuse_layout(s, layout, query.shape[0])


def padded_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    layout: RowLayout,
    rule: ScoreRule,
    grad_out: Tensor,
) -> list[Tensor | None]:
    """Compute gradients of packed attention in query, key, value, sinks, bias: summed in fp32, cast back at the end."""
    inputs = [query, key, value, sinks, bias if bias is None or bias.dim() == 3 else None]
    grads = [None if t is None else torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in inputs]
    of_query, of_key, of_value, of_sinks, of_bias = grads
    assert of_query is not None and of_key is not None and of_value is not None
    starts = layout.query_start.tolist()
    for piece, gathered in _pieces(query, key, value, layout, rule):
        with torch.autocast(query.device.type, enabled=False):  # of a caller whose backward runs inside it
            found = piece_gradients(gathered, grad_out, rule, sinks, bias, key.shape[1])
        real = gathered.row_is_real
        rows = gathered.rows[real]
        of_query[rows] = found.query[real]
        _add_key_gradients([of_key, of_value], (found.key, found.value), gathered, [starts[s] for s in piece.sequences])
        if of_bias is not None and found.bias is not None:
            of_bias[rows] = found.bias[real]
        if of_sinks is not None and found.sinks is not None:
            if of_sinks.dim() == 1:
                of_sinks += found.sinks.sum(dim=(0, 1))
            else:
                of_sinks[rows] = found.sinks[real]
    return [None if t is None or g is None else g.to(t.dtype) for t, g in zip(inputs, grads, strict=True)]


def _add_key_gradients(
    grads: list[Tensor], found: tuple[Tensor, Tensor], gathered: Gathered, starts: list[int]
) -> None:
    if len(starts) == 1:  # a long sequence may be cut into several runs of rows: add their parts
        num_keys = int(gathered.key_is_real.sum())
        for grad, part in zip(grads, found, strict=True):
            grad[starts[0] : starts[0] + num_keys] += part[0, :num_keys]
        return
    offset = torch.arange(gathered.key_is_real.shape[1], device=grads[0].device)
    rows = (torch.tensor(starts, device=grads[0].device)[:, None] + offset)[gathered.key_is_real]
    for grad, part in zip(grads, found, strict=True):
        grad[rows] = part[gathered.key_is_real]
