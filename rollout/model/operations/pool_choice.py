"""The pools of tokens that an indexer selects for rows (`pools.py`), and the tokens of these pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
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
    mask: Tensor | None = None  # that a module's code has put it into: it tells of packed rows
    _found: list[SelectedKeys | None] = field(default_factory=list)  # at most one; copies share it

    def tokens(
        self, layout: RowLayout, path: AttentionPath, cache: Tensor | None = None, slots: Tensor | None = None
    ) -> SelectedKeys | None:
        """Return the tokens of each row; None where all rows see all tokens. Layers that share the choice find it once.

        cache [num_blocks, block_size, D] and slots int64 [N]: of the indexer's keys in a step, written first.
        """
        if not self._found:
            self._found.append(self._tokens(layout, path, cache, slots))
        return self._found[0]

    def __invert__(self) -> PoolChoice:
        return self

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> PoolChoice:
        """Return the choice where a module's code puts it into the mask of its attention."""
        choice = next((each for each in args if isinstance(each, cls)), None)
        if func not in (Tensor.masked_fill, Tensor.__and__) or choice is None or choice is args[0]:
            raise ValueError(f"a module computes {getattr(func, '__name__', func)} of its selection: not supported")
        return replace(choice, mask=args[0])

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


def selects_like(sees: Tensor, asked: IndexQueries, keys: Tensor, rate: int) -> bool:
    """Return whether each row sees the best of its pools, by the score of these keys, and the tokens behind the last.

    sees: bool [N, N], what the rows of one sequence see by a module's own code, of one pool; keys [P, D] float32. Rows
    whose best pools are nearly equal are left out.
    """
    num_rows, num_pools = len(sees), len(keys)
    products = torch.relu(asked.query @ keys.t() * asked.scale)  # [N, H, P]
    scores, pools = (products * asked.weight[:, :, None]).sum(1), torch.arange(num_pools, device=keys.device)
    closed = (torch.arange(num_rows, device=keys.device) + 1) // rate
    scores = scores.masked_fill(pools >= closed[:, None], -torch.inf)
    best, second = scores.topk(2, dim=1).values.unbind(1)
    for row in range(num_rows):
        pool = int(scores[row].argmax()) * rate
        is_near = closed[row] > 1 and bool(best[row] - second[row] < 1e-2)
        expected = [*(range(pool, pool + rate) if closed[row] else ()), *range(int(closed[row]) * rate, row + 1)]
        if not is_near and sees[row].nonzero()[:, 0].tolist() != sorted(expected):
            return False
    return True
