"""Attention to a window of tokens and to compressed entries behind it (DeepSeek-V4, 2026).

Each window of `rate` tokens of a sequence, counted from position 0, gives one entry when its last token is there; this
token closes it. A row at position t attends to the last W tokens, itself included, and then to the entries that are
closed, w < (t + 1) // rate, or to those of them that an indexer selects. An entry stands beside the token that closes
it, so caches hold two keys a token: [..., 2, D]. Each row is a sequence of its own over keys in blocks of one, as in
`selected.py`, so its bits depend on its keys alone. Nothing is read on the host where a step's layout is given.

Letters: N rows, S sequences, E entries that may be closed by the rows, M keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .selection import IndexQueries, SelectedKeys, select_keys
from .step import AttentionPath, RowLayout


@dataclass(frozen=True)
class Closings:
    """The windows that rows close, in the order of sequences: as many as there may be, of which the first are real."""

    rows: Tensor  # int64 [E], that close them; 0 where none does
    owners: Tensor  # int64 [E], their sequences
    windows: Tensor  # int64 [E], counted from the beginning of the sequence
    is_real: Tensor  # bool [E]
    offsets: Tensor  # int64 [S + 1]: sequence s closes the windows from entry s up to entry s + 1

    @classmethod
    def of(cls, layout: RowLayout, num_rows: int, rate: int) -> Closings:
        starts = layout.query_start.to(torch.int64)
        lengths = starts.diff()
        ends = lengths if layout.context_lens is None else layout.context_lens.to(torch.int64)
        before = ends - lengths
        first = before // rate
        offsets = torch.cat([starts.new_zeros(1), (ends // rate - first).cumsum(0)])
        most = num_rows // rate + (len(lengths) if rate > 1 else 0)  # windows of one token are closed by each row
        entries = torch.arange(most, device=starts.device)
        owners = (torch.searchsorted(offsets, entries, right=True) - 1).clamp(max=len(lengths) - 1)
        is_real = entries < offsets[-1]
        windows = torch.where(is_real, first[owners] + entries - offsets[owners], 0)
        rows = starts[owners] + (windows + 1) * rate - 1 - before[owners]
        return cls(torch.where(is_real, rows, 0), owners, windows, is_real, offsets)

    def by_row(self, entries: Tensor, num_rows: int) -> Tensor:
        """Put entries [E, D] beside the rows that close them -> [N, D], zeros beside others. Differentiable."""
        places = torch.where(self.is_real, self.rows, num_rows)
        return entries.new_zeros(num_rows + 1, entries.shape[1]).index_copy(0, places, entries)[:num_rows]


@dataclass(frozen=True)
class Places:
    """The positions of rows, and the slots of positions: of a step's cache, or of packed rows."""

    layout: RowLayout
    owners: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    block_size: int  # 0: packed rows

    @classmethod
    def of(cls, layout: RowLayout, num_rows: int, block_size: int) -> Places:
        starts = layout.query_start.to(torch.int64)
        rows = torch.arange(num_rows, device=starts.device)
        owners = (torch.searchsorted(starts, rows, right=True) - 1).clamp(max=len(starts) - 2)
        ends = starts.diff() if layout.context_lens is None else layout.context_lens.to(torch.int64)
        return cls(layout, owners, ends[owners] - (starts[owners + 1] - rows), block_size)

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slots [N, M] of positions [N, M] of each row's sequence."""
        if self.layout.block_tables is None:
            return self.layout.query_start.to(torch.int64)[self.owners][:, None] + positions
        blocks = (positions // self.block_size).clamp(max=self.layout.block_tables.shape[1] - 1)
        ids = self.layout.block_tables.to(torch.int64)[self.owners].gather(1, blocks)
        return ids * self.block_size + positions % self.block_size

    def most_entries(self, rate: int) -> int:
        """Return how many entries a sequence may have; read on the host for packed rows."""
        if self.layout.block_tables is None:
            return int(self.layout.query_start.diff().max()) // rate if len(self.positions) else 0
        return self.layout.block_tables.shape[1] * self.block_size // rate

    def seen(self, window: int, rate: int, chosen: SelectedKeys | None) -> SelectedKeys:
        """Return the keys of each row among caches of two keys a slot: its window, then its entries.

        chosen: the slots of the tokens that close a row's entries; None: it sees all that are closed.
        """
        of_window = (self.positions + 1).clamp(max=window)[:, None]
        closed = (self.positions + 1) // rate
        counts = closed if chosen is None else torch.minimum(closed, chosen.counts.to(torch.int64))
        most = self.most_entries(rate) if chosen is None else chosen.places.shape[1]
        index = torch.arange(window + most, device=counts.device)
        entry = (index - of_window).clamp(min=0)
        tokens = self.slots((self.positions[:, None] + 1 - of_window + index).clamp(max=self.positions[:, None]))
        if chosen is None:
            last = self.positions[:, None].clamp(min=0)
            closers = self.slots(torch.minimum((entry + 1) * rate - 1, last))
        else:
            closers = chosen.places.to(torch.int64).gather(1, entry.clamp(max=max(most - 1, 0)))
        places = torch.where(index < of_window, 2 * tokens, 2 * closers + 1)
        return SelectedKeys(places.to(torch.int32), (of_window[:, 0] + counts).to(torch.int32))

    def pools(self, rate: int, chosen: SelectedKeys) -> SelectedKeys:
        """Return the tokens of each row: those of its chosen windows, and those behind the last window that is closed.

        chosen: the slots of the tokens that close the windows, which lie behind one another up to these.
        """
        closed = (self.positions + 1) // rate
        of_windows = torch.minimum(closed, chosen.counts.to(torch.int64)) * rate
        index = torch.arange(chosen.places.shape[1] * rate + rate - 1, device=closed.device)
        closers = chosen.places.to(torch.int64).gather(
            1, (index // rate).clamp(max=chosen.places.shape[1] - 1).expand(len(closed), -1)
        )
        tail = closed * rate - of_windows
        behind = self.slots((tail[:, None] + index).clamp(max=self.positions[:, None]))
        places = torch.where(index < of_windows[:, None], closers + index % rate - (rate - 1), behind)
        counts = of_windows + self.positions + 1 - closed * rate
        return SelectedKeys(places.to(torch.int32), counts.to(torch.int32))

    def choose(
        self, asked: IndexQueries, keys: Tensor, rate: int, closings: Closings, path: AttentionPath
    ) -> SelectedKeys:
        """Select the entries of each row by an indexer's score; returns the slots of the tokens that close them.

        keys: of entries, [E, D] in the order of `closings` for packed rows, else a cache [num_blocks, block_size, D]
        whose blocks hold their entries at their beginning (`entry_slots`).
        """
        closed = ((self.positions + 1) // rate).clamp(min=1).to(torch.int32)
        starts = torch.arange(len(closed) + 1, dtype=torch.int32, device=closed.device)
        if self.layout.block_tables is None:
            index = torch.arange(max(self.most_entries(rate), 1), device=closed.device)
            tables = (closings.offsets[self.owners][:, None] + index).clamp(max=len(keys) - 1)
            found = select_keys(asked, keys[:, None], RowLayout(starts, closed, tables.to(torch.int32)), path=path)
            return SelectedKeys(closings.rows[found.places.clamp(0, len(keys) - 1)].to(torch.int32), found.counts)
        # The beginnings of blocks are blocks of their own, each the first of `rate` of them.
        tables = self.layout.block_tables[self.owners] * rate
        cache = keys.view(-1, self.block_size // rate, keys.shape[-1])
        found = select_keys(asked, cache, RowLayout(starts, closed, tables), path=path)
        within = found.places % self.block_size
        return SelectedKeys(found.places - within + within * rate + rate - 1, found.counts)


def entry_slots(slots: Tensor, block_size: int, rate: int) -> Tensor:
    """Return the slots, at the beginning of blocks, of the entries that tokens close; `slots` int64 are the tokens'."""
    within = slots % block_size
    return slots - within + within // rate
