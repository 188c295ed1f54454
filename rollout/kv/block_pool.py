"""The free list of KV blocks: numbers only, no tensors."""

from __future__ import annotations


class BlockPool:
    """Hand out block ids 0 .. num_blocks-1, the most recently returned first (its memory is the warmest)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` out of the free list. The list must hold at least that many."""
        assert 0 <= num_blocks <= len(self._free), (num_blocks, len(self._free))
        if num_blocks == 0:
            return []
        taken = self._free[-num_blocks:][::-1]
        del self._free[-num_blocks:]
        return taken

    def give(self, block: int) -> None:
        """Return one block."""
        self._free.append(block)

    def free_ids(self) -> frozenset[int]:
        """Return the free block ids, for checks."""
        return frozenset(self._free)
