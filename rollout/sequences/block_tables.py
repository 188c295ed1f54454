"""Block tables of the sequences that hold blocks, as rows of one array, from which a step copies its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

_FIRST_ROWS, _FIRST_WIDTH = 16, 16


@dataclass(slots=True, eq=False)
class OwnBlocks:
    """The blocks of one sequence as a list, for steps of so few rows that an array costs more than it saves."""

    row: int  # of the table
    blocks: list[int] = field(default_factory=list)
    version: int = 0  # another number after each change, and in each sequence


class BlockTables:
    """The table with one row a sequence, until `drop`. A step writes only the blocks that it appends.

    The array doubles when it is too small, so in the long run nothing is allocated.
    """

    def __init__(self) -> None:
        self._table = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32)
        self._lengths = np.zeros(_FIRST_ROWS, np.int32)
        self._own: dict[str, OwnBlocks] = {}
        self._num_changes = 0
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))

    def __contains__(self, id: str) -> bool:
        return id in self._own

    def add(self, id: str) -> None:
        """Add a sequence without blocks."""
        assert id not in self._own, id
        if not self._free:
            num_rows = len(self._lengths)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
        self._own[id] = own = OwnBlocks(self._free.pop())
        self._lengths[own.row] = 0
        self._changed(own)

    def append(self, id: str, blocks: Sequence[int]) -> None:
        """Append blocks to the sequence's table."""
        own = self._own[id]
        row, start = own.row, len(own.blocks)
        end = start + len(blocks)
        if end > self._table.shape[1]:
            self._widen(max(end, 2 * self._table.shape[1]))
        self._table[row, start:end] = blocks
        self._lengths[row] = end
        own.blocks += blocks
        self._changed(own)

    def _widen(self, width: int) -> None:
        wider = np.zeros((len(self._table), width), np.int32)
        wider[:, : self._table.shape[1]] = self._table
        self._table = wider

    def cut(self, id: str, num_blocks: int) -> None:
        """Cut the sequence's table to its first `num_blocks` blocks, if it has more."""
        own = self._own[id]
        del own.blocks[num_blocks:]
        self._lengths[own.row] = len(own.blocks)
        self._changed(own)

    def drop(self, id: str) -> None:
        """Remove the sequence."""
        self._free.append(self._own.pop(id).row)

    def blocks(self, id: str) -> list[int]:
        """Return the blocks of one sequence."""
        return list(self._own[id].blocks)

    def own(self, id: str) -> OwnBlocks:
        """Return the blocks of one sequence, which its next change changes too."""
        return self._own[id]

    def _changed(self, own: OwnBlocks) -> None:
        self._num_changes += 1
        own.version = self._num_changes

    def gather_ahead(self, growing: Sequence[tuple[str, Sequence[int]]]) -> np.ndarray:
        """Return `gather` of the tables with these blocks appended. Changes nothing."""
        rows = [self._own[id].row for id, _ in growing]
        lengths = self._lengths[rows].tolist()
        # The longest with its own new blocks: recorded buffers have room for no more than one sequence may hold.
        width = max(length + len(blocks) for length, (_, blocks) in zip(lengths, growing, strict=True))
        tables = np.zeros((len(rows), width), np.int32)
        num_known = min(width, self._table.shape[1])
        tables[:, :num_known] = self._table[rows, :num_known]
        for table, start, (_, blocks) in zip(tables, lengths, growing, strict=True):
            if blocks:
                table[start : start + len(blocks)] = blocks
        return tables

    def gather(self, ids: Iterable[str]) -> np.ndarray:
        """Copy the tables of these sequences: int32 [S, longest of them]. Entries after a table's end are undefined."""
        own = self._own
        rows = [own[id].row for id in ids]
        return self._table[rows, : self._lengths[rows].max(initial=0)]
