"""The last inputs of each row of a sequence, for convolutions whose weights differ from row to row.

Every operation is elementwise, or moves rows, so a row's result depends on its own inputs alone, and nothing is read on
the host. Letters: R rows, C channels, w width, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .slots import Slots


def causal_windows(
    x: Tensor, cu_seqlens: Tensor, width: int, slots: Slots | None = None, lags: Sequence[int] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the inputs 0, 1, ..., w - 1 rows before each row, [R, C] each, and the last w - 1 of each sequence.

    x [R, C]; cu_seqlens: int32 [S + 1], the rows at which sequences start, and their number; lags: which of the rows
    before, in place of all, the first of them 0. The inputs before a sequence are its state [w - 1, C] in `slots`,
    which are only read, or zeros. Differentiable in x. Returns the final states [S, w - 1, C].
    """
    starts = cu_seqlens.to(torch.int64)
    rows = torch.arange(len(x), device=x.device)
    owners = (torch.searchsorted(starts, rows, right=True) - 1).clamp(max=len(starts) - 2)
    taps = [x]
    for lag in (range(width) if lags is None else lags)[1:]:
        num_rows = max(len(x) - lag, 0)
        shifted = torch.cat([x.new_zeros(len(x) - num_rows, x.shape[1]), x[:num_rows]])
        taps.append(_where_inside(shifted, rows - lag, owners, starts, slots))
    return taps, last_inputs(x, cu_seqlens, width, slots)


def last_inputs(x: Tensor, cu_seqlens: Tensor, width: int, slots: Slots | None = None) -> Tensor:
    """Return the last w - 1 inputs of each sequence, [S, w - 1, C], without a gradient; the rest as above."""
    ends = cu_seqlens.to(torch.int64)[1:]
    return look_back(x.detach(), cu_seqlens, ends, torch.arange(len(ends), device=x.device), width - 1, slots)


def look_back(
    x: Tensor, cu_seqlens: Tensor, ends: Tensor, owners: Tensor, count: int, slots: Slots | None = None
) -> Tensor:
    """Return `count` inputs before each of the rows `ends`, int64 [K], of the sequences `owners` [K]: [K, count, C].

    x, cu_seqlens and slots as in `causal_windows`; not further back than the states reach. Differentiable in x.
    """
    rows = ends[:, None] - count + torch.arange(count, device=x.device)
    known = x if len(x) else x.new_zeros(1, x.shape[1])  # sequences without rows look at their states alone
    found = known[rows.clamp(0, len(known) - 1).flatten()]
    inside = _where_inside(found, rows.flatten(), owners.repeat_interleave(count), cu_seqlens.to(torch.int64), slots)
    return inside.view(len(ends), count, x.shape[1])


def _where_inside(inputs: Tensor, rows: Tensor, owners: Tensor, starts: Tensor, slots: Slots | None) -> Tensor:
    """Return inputs [K, C] of these rows [K]; where a row is before its owner's chain, that of the chain's state."""
    if slots is None:
        return torch.where((rows >= starts[owners])[:, None], inputs, inputs.new_zeros(()))
    heads = slots.heads()[owners]
    first, span = starts[heads], slots.pool.shape[1]
    index = (span + rows - first).clamp(0, max(span - 1, 0))
    return torch.where((rows >= first)[:, None], inputs, slots.pool[slots.reads[heads], index].to(inputs.dtype))
