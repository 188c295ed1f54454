"""The keys that an indexer selects for each row: DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, 2025).

A small indexer beside the attention scores all positions that a row may see, and the row attends to the best of them:
    score of a key = sum over h of weight[h] * max(0, scale * query[h] . key), in fp32.
Of equal scores the earlier position is the better one. A score depends on its row and its key alone, so the selection
is the same for any batch, chunking, block size and thread count, in the engine and in the trainer. (Each path keeps
that promise; scores of two paths are only close.) Nothing here is differentiable, as in the models' own code.

Dimension letters: N rows of a step, S sequences, H heads of the indexer, D their width, M keys that a row may select.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..machine import native
from .step import AttentionPath, RowLayout, refuse_layout

SOURCE = "attention/select_keys.cpp"
_BUDGET = 1 << 22  # products that the PyTorch path holds at a time


@dataclass(frozen=True)
class IndexQueries:
    """The questions of an indexer, one for each row."""

    query: Tensor  # [N, H, D] float32
    weight: Tensor  # [N, H] float32
    scale: float
    most: int  # M


@dataclass(frozen=True)
class SelectedKeys:
    """The keys of each row, in the order of their positions."""

    places: Tensor  # int32 [N, M], rows of the flattened cache; entries from a row's count on are not read
    counts: Tensor  # int32 [N]

    def layout(self) -> RowLayout:
        """Return the rows as sequences of their own, over caches in blocks of one key."""
        num_rows = len(self.counts)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.counts.device)
        return RowLayout(starts, self.counts, self.places)


def sees_more_than(layout: RowLayout, block_size: int, most: int) -> bool:
    """Return whether a row may see more than `most` keys, as far as shapes and, of packed rows, the offsets tell."""
    if layout.block_tables is not None:
        return layout.block_tables.shape[1] * block_size > most
    return bool((layout.query_start.diff() > most).any())


def select_keys(
    asked: IndexQueries,
    keys: Tensor,
    layout: RowLayout,
    *,
    path: AttentionPath,
    fresh: Tensor | None = None,
    slots: Tensor | None = None,
) -> SelectedKeys:
    """Select keys [num_blocks, block_size, D] for a step's rows, or [N, 1, D] for packed ones.

    fresh [N, D] with slots int64 [N]: the keys of the rows, written there first. path: that of the attention. Raises
    ValueError for a layout that does not fit; on a GPU its contents are not checked.
    """
    if fresh is not None and fresh.dtype != keys.dtype:
        raise ValueError(f"select_keys: the new keys are {fresh.dtype}, the others {keys.dtype}")
    if path == "native":
        return _select_native(asked, keys, layout, fresh, slots)
    if fresh is not None and slots is not None:
        write_rows(fresh, keys, slots)
    places, counts = _places_seen(layout, keys.shape[1], len(asked.query))
    if path == "triton":
        from .triton_selection import triton_scores  # imports Triton, which may not be installed

        scores = triton_scores(asked.query, asked.weight, asked.scale, keys.flatten(0, 1), places, counts)
    else:
        scores = _scores(asked, keys.flatten(0, 1), places, counts)
    return _best(scores, places, counts, asked.most)


def write_rows(fresh: Tensor, keys: Tensor, slots: Tensor) -> None:
    """Write keys [N, D] to their slots, int64 [N], of a cache [num_blocks, block_size, D]."""
    keys.flatten(0, 1).index_copy_(0, slots, fresh)


# -- in C++ ------------------------------------------------------------------------------------------------------------


@cache
def _entry_point() -> Callable[..., int]:
    library = native.load(SOURCE)
    if library is None:
        raise ValueError(f"the native selection of keys was asked for, but {native.why_unavailable(SOURCE)}")
    arguments = [*[ctypes.c_void_p] * 10, *[ctypes.c_int64] * 9, ctypes.c_float, *[ctypes.c_int64] * 2]
    return library.function("lockstep_select_keys", arguments, ctypes.c_int64)


def _select_native(
    asked: IndexQueries, keys: Tensor, layout: RowLayout, fresh: Tensor | None, slots: Tensor | None
) -> SelectedKeys:
    query, weight = asked.query.contiguous(), asked.weight.contiguous()
    num_rows, heads, width = query.shape
    tables, contexts, starts = layout.block_tables, layout.context_lens, layout.query_start
    table_sizes = (0, 0, 1) if tables is None else (tables.shape[1], tables.stride(0), keys.shape[1])
    fresh = None if fresh is None else fresh.contiguous()
    places = torch.empty(num_rows, asked.most, dtype=torch.int32, device="cpu")
    counts = torch.empty(num_rows, dtype=torch.int32, device="cpu")
    tensors = query, weight, keys, fresh, slots, tables, starts, contexts, places, counts
    bad = native.run(
        _entry_point(),
        *(None if t is None else t.data_ptr() for t in tensors),
        *(num_rows, len(starts) - 1, keys.shape[0] * keys.shape[1], *table_sizes),
        *(heads, width, asked.most, asked.scale, keys.dtype is torch.bfloat16, torch.get_num_threads()),
        kept=tensors,
    )
    if bad < -1 and slots is not None:
        raise ValueError(f"row {-2 - bad} is to be written at slot {int(slots[-2 - bad])}, beyond the cache")
    if bad:
        refuse_layout(bad - 1, layout, num_rows)
    return SelectedKeys(places, counts)


# -- with PyTorch's operations, on any device --------------------------------------------------------------------------


def _places_seen(layout: RowLayout, block_size: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the places of all positions of each row's sequence, int64 [N, L], and how many of them it sees, [N]."""
    starts = layout.query_start.to(torch.int64)
    rows = torch.arange(num_rows, device=starts.device)
    owner = torch.searchsorted(starts, rows, right=True) - 1
    behind = starts[owner + 1] - 1 - rows  # rows of the sequence behind this one
    if layout.block_tables is None or layout.context_lens is None:
        positions = torch.arange(int(starts.diff().max()), device=starts.device)
        return starts[owner][:, None] + positions, rows - starts[owner] + 1
    tables = layout.block_tables.to(torch.int64)[owner]
    within = torch.arange(block_size, device=starts.device)
    places = (tables[:, :, None] * block_size + within).flatten(1)
    return places, layout.context_lens.to(torch.int64)[owner] - behind


def _scores(asked: IndexQueries, keys: Tensor, places: Tensor, counts: Tensor) -> Tensor:
    """Compute scores [N, L] of the keys at `places`, -inf for those that a row does not see."""
    num_rows, length = places.shape
    scores = asked.weight.new_full((num_rows, length), -torch.inf)
    at_once = max(1, _BUDGET // (asked.query[0].numel() * length))
    for first in range(0, num_rows, at_once):
        part = slice(first, first + at_once)
        seen = places[part].clamp(0, len(keys) - 1)
        products = asked.query[part][:, None] * keys[seen].float()[:, :, None]  # [n, L, H, D]
        by_head = torch.relu(_summed(products) * asked.scale) * asked.weight[part][:, None]
        scores[part] = _summed(by_head)
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.finfo(scores.dtype).min)
    unseen = torch.arange(length, device=scores.device) >= counts[:, None]
    return scores.masked_fill(unseen, -torch.inf)


def _summed(values: Tensor) -> Tensor:
    """Sum the last dimension by halves: sums of two numbers, whose bits depend on no other row on any device."""
    while (width := values.shape[-1]) > 1:
        half = width // 2
        odd = values[..., 2 * half :]
        values = values[..., :half] + values[..., half : 2 * half]
        if odd.shape[-1]:
            values = torch.cat([values[..., :1] + odd, values[..., 1:]], -1)
    return values[..., 0]


def _best(scores: Tensor, places: Tensor, counts: Tensor, most: int) -> SelectedKeys:
    """Select the `most` highest scores of each row, of equal ones the earlier, without a read by the host."""
    length = scores.shape[1]
    lowest = scores.topk(min(most, length), dim=1).values[:, -1:]
    above, at = scores > lowest, (scores == lowest) & (scores > -torch.inf)
    left = most - above.sum(1, keepdim=True)
    chosen = above | (at & (at.cumsum(1) <= left))
    positions = torch.arange(length, device=scores.device).expand_as(scores)
    first = torch.where(chosen, positions, length).sort(1).values[:, :most].clamp(max=length - 1)
    found = places.gather(1, first).to(torch.int32)
    if found.shape[1] < most:
        found = torch.nn.functional.pad(found, (0, most - found.shape[1]))
    return SelectedKeys(found.contiguous(), counts.clamp(max=most).to(torch.int32))
