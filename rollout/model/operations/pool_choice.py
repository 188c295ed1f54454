"""The pools of tokens that an indexer selects for rows (`pools.py`), and the tokens of these pools."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ....kernels.attention.compressed import Closings, Places
from ....kernels.attention.selection import IndexQueries, SelectedKeys
from ....kernels.attention.step import AttentionPath, RowLayout
from .entries import write_entries
from .indexer import WATCHING


@dataclass(frozen=True)
class PoolChoice:
    """The pools that rows select. An indexer returns it in place of indices, and its attention gets it as a mask."""

    rate: int  # tokens of a pool
    closings: Closings
    asked: IndexQueries
    keys: Tensor  # [E, D], in the order of the closings
    layer: int  # of the indexer, in whose cache the keys are
    _found: list[SelectedKeys | None] = field(default_factory=list)  # at most one

    def tokens(
        self, layout: RowLayout, path: AttentionPath, cache: Tensor | None = None, slots: Tensor | None = None
    ) -> SelectedKeys | None:
        """Return the tokens of each row; None where all rows see all tokens. Layers that share the choice find it once.

        cache [num_blocks, block_size, D] and slots int64 [N]: of the indexer's keys in a step, written first.
        """
        if not self._found:
            self._found.append(self._tokens(layout, path, cache, slots))
        return self._found[0]

    def _tokens(
        self, layout: RowLayout, path: AttentionPath, cache: Tensor | None, slots: Tensor | None
    ) -> SelectedKeys | None:
        block_size = 0 if cache is None else cache.shape[1]
        if cache is not None and slots is not None:
            write_entries(self.keys, cache, slots, self.closings, self.rate)
        places = Places.of(layout, len(self.asked.query), block_size)
        if places.most_entries(self.rate) <= self.asked.most:
            return None
        chosen = places.choose(self.asked, self.keys if cache is None else cache, self.rate, self.closings, path)
        if cache is None and (watch := WATCHING.get()) is not None:
            watch(SelectedKeys(chosen.places // self.rate, chosen.counts))  # the pools of one whole sequence
        return places.pools(self.rate, chosen)
