"""The keys that rows of a block see, where the rows of a block see each other, as those of an image do (`row_ends`)."""

from __future__ import annotations

import torch
from torch import Tensor


def runs_of(block_ids: Tensor, query_start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each row, and the end of the run of rows of one id and sequence that it is in; int64 [N].

    block_ids [N]: of rows, query_start int32 [S + 1]: row offsets of their sequences.
    """
    num_rows = len(block_ids)
    rows = torch.arange(num_rows, device=block_ids.device)
    sequence = torch.searchsorted(query_start.to(torch.int64), rows, right=True) - 1
    is_last = torch.ones(num_rows, dtype=torch.bool, device=block_ids.device)
    is_last[:-1] = (block_ids[1:] != block_ids[:-1]) | (sequence[1:] != sequence[:-1])
    ends = torch.where(is_last, rows + 1, num_rows)
    return sequence, ends.flip(0).cummin(0).values.flip(0)


def row_ends(block_ids: Tensor, query_start: Tensor, context_lens: Tensor | None) -> Tensor:
    """Return the keys of its sequence that each row sees: up to its block's last one, or up to its own; int32 [N].

    block_ids [N]: the same, not negative, for the rows of a block, and negative for rows of none; query_start int32
    [S + 1]; context_lens int32 [S]: tokens of each sequence, its rows included; None: its rows are all. Raises
    ValueError where the rows of a block do not stand side by side: it waits for the tensors on the host.
    """
    sequence, ends = runs_of(block_ids, query_start)
    is_block = block_ids >= 0
    keys = sequence * (block_ids.max() + 1) + block_ids  # ascending from block to block
    begins = is_block.clone()
    begins[1:] &= ends[1:] != ends[:-1]
    before = torch.where(is_block, keys, -1).cummax(0).values
    if bool((begins[1:] & (keys[1:] <= before[:-1])).any()):
        raise ValueError("tokens of several images attend to each other in both directions here: not supported")
    starts = query_start.to(torch.int64)
    own = torch.where(is_block, ends, torch.arange(1, len(ends) + 1, device=ends.device)) - starts[sequence]
    if context_lens is not None:
        own += (context_lens - query_start.diff())[sequence]
    return own.to(torch.int32)
