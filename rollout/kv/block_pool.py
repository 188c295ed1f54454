"""The free list of KV blocks: numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


class BlockPool:
    """Hand out block ids 0 .. num_blocks-1, the most recently returned first (its memory is the warmest).

    Ids that were never taken are a range, so a large pool takes memory only for those that came back.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._returned: list[int] = []
        self._fresh = range(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._returned) + len(self._fresh)

    def take(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` out of the free list. The list must hold at least that many."""
        assert 0 <= num_blocks <= self.num_free, (num_blocks, self.num_free)
        first = max(len(self._returned) - num_blocks, 0)
        taken = self._returned[first:][::-1]
        del self._returned[first:]
        num_fresh = num_blocks - len(taken)
        taken += self._fresh[:num_fresh]
        self._fresh = self._fresh[num_fresh:]
        return taken

    def give(self, block: int) -> None:
        """Return one block."""
        self._returned.append(block)

    def free_ids(self) -> FreeIds:
        """Return the ids that are free now."""
        return FreeIds(frozenset(self._returned), self._fresh)


class FreeIds(Set[int]):
    """The ids of some blocks, without a list of those that were never taken. Its `len` counts an id once."""

    def __init__(self, returned: frozenset[int], fresh: range) -> None:
        self._returned, self._fresh = returned, fresh

    def __contains__(self, block: object) -> bool:
        return block in self._returned or block in self._fresh

    def __iter__(self) -> Iterator[int]:
        return chain((block for block in self._returned if block not in self._fresh), self._fresh)

    def __len__(self) -> int:
        return len(self._fresh) + sum(block not in self._fresh for block in self._returned)

    @classmethod
    def _from_iterable(cls, blocks: Iterable[T]) -> Set[T]:  # the results of & and |
        return frozenset(blocks)
