"""Block tables of the sequences that hold blocks, as rows of one array, from which a step copies its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_FIRST_ROWS, _FIRST_WIDTH = 16, 16


class BlockTables:
    """The table with one row a sequence, until `drop`. A step writes only the blocks that it appends.

    The array doubles when it is too small, so in the long run nothing is allocated.
    """

    def __init__(self) -> None:
        self._table = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32)
        self._lengths = np.zeros(_FIRST_ROWS, np.int32)
        self._rows: dict[str, int] = {}
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))

    def __contains__(self, id: str) -> bool:
        return id in self._rows

    def add(self, id: str) -> None:
        """Add a sequence without blocks."""
        assert id not in self._rows, id
        if not self._free:
            num_rows = len(self._lengths)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
        self._rows[id] = row = self._free.pop()
        self._lengths[row] = 0

    def append(self, id: str, blocks: Sequence[int]) -> None:
        """Append blocks to the sequence's table."""
        row = self._rows[id]
        start = int(self._lengths[row])
        end = start + len(blocks)
        if end > self._table.shape[1]:
            self._widen(max(end, 2 * self._table.shape[1]))
        self._table[row, start:end] = blocks
        self._lengths[row] = end

    def _widen(self, width: int) -> None:
        wider = np.zeros((len(self._table), width), np.int32)
        wider[:, : self._table.shape[1]] = self._table
        self._table = wider

    def cut(self, id: str, num_blocks: int) -> None:
        """Cut the sequence's table to its first `num_blocks` blocks, if it has more."""
        row = self._rows[id]
        self._lengths[row] = min(num_blocks, int(self._lengths[row]))

    def drop(self, id: str) -> None:
        """Remove the sequence."""
        self._free.append(self._rows.pop(id))

    def blocks(self, id: str) -> list[int]:
        """Return the blocks of one sequence."""
        row = self._rows[id]
        return self._table[row, : self._lengths[row]].tolist()

    def gather_ahead(self, growing: Sequence[tuple[str, Sequence[int]]]) -> np.ndarray:
        """Return `gather` of the tables with these blocks appended. Changes nothing."""
        rows = [self._rows[id] for id, _ in growing]
        lengths = self._lengths[rows]
        tables = np.zeros((len(rows), int(lengths.max()) + max(len(blocks) for _, blocks in growing)), np.int32)
        num_known = min(tables.shape[1], self._table.shape[1])
        tables[:, :num_known] = self._table[rows, :num_known]
        for table, start, (_, blocks) in zip(tables, lengths.tolist(), growing, strict=True):
            if blocks:
                table[start : start + len(blocks)] = blocks
        return tables

    def gather(self, ids: Iterable[str]) -> np.ndarray:
        """Copy the tables of these sequences: int32 [S, longest of them]. Entries after a table's end are undefined."""
        rows = list(map(self._rows.__getitem__, ids))
        return self._table[rows, : self._lengths[rows].max(initial=0)]
