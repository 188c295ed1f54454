"""The division of a recurrence's heads among the ranks that share a layer.

The projections around a recurrence give every rank the rows of all heads, as the families' plans have it. Each rank
runs some of the heads, keeps their states alone, and gathers the results of the others: heads do not meet in a
recurrence, so the bits are those of one rank. Letters: R rows, H heads, G key heads (groups), V size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...sharding.collectives import StageRanks

ALL = slice(None)
ALONE = StageRanks()


@dataclass(frozen=True)
class HeadShare:
    """The heads of one layer that this rank runs."""

    heads: slice  # of H
    key_heads: slice  # of G; each serves H / G heads in a row
    ranks: StageRanks = ALONE

    def gathered(self, out: Tensor) -> Tensor:
        """Return out [R, H, V] of all heads from this rank's [R, H / tp, V]. A collective where heads are divided."""
        if self.ranks.tp == 1:
            return out
        return self.ranks.gather_columns(out.flatten(1)).unflatten(1, (-1, out.shape[2]))


WHOLE = HeadShare(ALL, ALL)


@dataclass(frozen=True)
class HeadDivision:
    """The ranks that share each layer."""

    ranks: StageRanks = ALONE
    tp_rank: int = 0

    def share(self, num_heads: int, num_key_heads: int) -> HeadShare:
        """Return this rank's heads: all of them where heads or their groups do not divide."""
        tp = self.ranks.tp
        if tp == 1 or num_heads % tp or (num_key_heads % tp and tp % num_key_heads):
            return WHOLE
        first = num_key_heads * self.tp_rank // tp  # several ranks may need the same group
        keys = slice(first, first + max(num_key_heads // tp, 1))
        size = num_heads // tp
        return HeadShare(slice(self.tp_rank * size, (self.tp_rank + 1) * size), keys, self.ranks)


UNDIVIDED = HeadDivision()
