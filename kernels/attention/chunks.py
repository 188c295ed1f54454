"""Attention within chunks of positions (Llama 4's local layers): a row sees the keys from its chunk's first one on.

Chunks of a sequence see nothing of each other, so each is a sequence of its own to the kernels of `paged.py`, with
positions from 0 and a table of its own blocks. A row therefore has the bits of causal attention over its chunk.

Everything is computed from shapes on the tensors' device: the host waits for nothing, and a recorded step repeats it.
Dimension letters as in `paged.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .step import PagedStep


def chunked_starts(query_start: Tensor, chunk: int, num_rows: int) -> Tensor:
    """Return the row offsets int32 [C + 1] of the chunks of packed sequences; some may be empty.

    query_start int32 [S + 1]; chunk: tokens.
    """
    if num_rows <= chunk:
        return query_start
    lens = query_start.diff()
    num_chunks = math.ceil(num_rows / chunk)  # as many as one sequence of all rows has
    starts, _ = _cut(query_start, torch.zeros_like(lens), lens, chunk, num_chunks)
    return starts


def chunked_step(step: PagedStep, chunk: int, block_size: int, num_rows: int) -> tuple[PagedStep, int]:
    """Return the layout of a step whose sequences are the chunks that its rows are in, and its block size.

    Where no context is longer than a chunk, both are the step's own. A chunk that begins inside a block makes blocks
    smaller: read the caches with `in_blocks`. Each sequence has a row at least.
    """
    tables, width = step.block_tables, step.block_tables.shape[1]
    if width * block_size <= chunk:
        return step, block_size
    size = math.gcd(chunk, block_size)
    if size < block_size:
        parts = torch.arange(block_size // size, dtype=torch.int32, device=tables.device)
        tables = (tables[:, :, None] * (block_size // size) + parts).flatten(1)
    num_sequences = len(step.context_lens)
    most_rows = num_rows - num_sequences + 1  # of a sequence
    num_chunks = 1 + math.ceil((most_rows - 1) / chunk)  # of so many rows, wherever they begin
    before = step.context_lens - step.query_start.diff()
    starts, first = _cut(step.query_start, before, step.context_lens, chunk, num_chunks)
    lens = (step.context_lens[:, None] - first).clamp(min=0, max=chunk)
    of_chunk = torch.arange(chunk // size, dtype=torch.int32, device=tables.device)
    blocks = (first[:, :, None] // size + of_chunk).clamp(max=tables.shape[1] - 1)
    own = tables.gather(1, blocks.flatten(1).to(torch.int64)).view(-1, chunk // size)
    return PagedStep(own, starts, lens.flatten()), size


def in_blocks(cache: Tensor, block_size: int) -> Tensor:
    """Return a view of a cache [num_blocks, B, K, D] in blocks of `block_size` tokens, which divides B."""
    if cache.shape[1] == block_size:
        return cache
    return cache.unflatten(1, (-1, block_size)).flatten(0, 1)


def _cut(query_start: Tensor, before: Tensor, ends: Tensor, chunk: int, num_chunks: int) -> tuple[Tensor, Tensor]:
    """Cut the rows of sequences at positions that are multiples of `chunk`, into `num_chunks` parts each.

    before, ends int32 [S]: positions of a sequence's first row, and after its last. Returns row offsets int32
    [S * num_chunks + 1] and the first position of each chunk, int32 [S, num_chunks]; chunks behind the end are empty.
    """
    index = torch.arange(num_chunks, dtype=torch.int32, device=query_start.device)
    first = (before // chunk)[:, None] * chunk + index * chunk
    rows = (torch.minimum(first, ends[:, None]) - before[:, None]).clamp(min=0)
    starts = (query_start[:-1, None] + rows).flatten()
    return torch.cat([starts, query_start[-1:]]), first
