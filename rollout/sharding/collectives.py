"""Collectives of the ranks that share a layer: sums of partial products, gathered columns, rows looked up.

The cost of a row-parallel product, per layer, with M rows of N features: in invariant mode each rank receives k_blocks
* (tp - 1) / tp * M * N elements (an all-gather of the partial products), otherwise about 2 * (tp - 1) / tp * M * N (an
all-reduce): k_blocks / 2 times as much. A layer has two such products. All elements travel in the activations' dtype.
Example: 28 layers, N = 1024, bfloat16, tp = k_blocks = 2, M = 32 decode rows: 64 KiB a product and 3.5 MiB a step. Over
gloo on one host such a sum took 0.7 ms instead of 0.3, and with 2048 rows 79 ms instead of 19: few rows pay for
latency, many for gloo's slow all-gather. Through memory that both ranks share (on another machine) a sum takes 19
microseconds with 32 rows and 2.1 ms with 2048.

Letters: B K-blocks of the layer, M rows, N features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ...kernels.collectives.exchange import SharedMemory
from ...kernels.linear.linear import Product, add_blocks, block_partials
from ..ranks.mesh import Mesh


@dataclass(frozen=True)
class StageRanks:
    """The ranks that share the layers of a stage. Their collectives go through shared memory where they have it."""

    tp: int = 1
    group: dist.ProcessGroup | None = None  # None when tp == 1
    memory: SharedMemory | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> StageRanks:
        return cls(mesh.tp, mesh.tp_group, mesh.tp_memory)

    def gather(self, part: Tensor) -> Tensor:
        """Gather every rank's part, equal in shape, stacked by rank: [tp, *part.shape]."""
        if self.group is None:
            return part.unsqueeze(0)
        if self.memory is not None:
            return self.memory.gather(part)
        out = part.new_empty(self.tp, *part.shape)
        dist.all_gather(list(out.unbind(0)), part.contiguous(), group=self.group)
        return out

    def gather_columns(self, part: Tensor) -> Tensor:
        """Gather [..., N / tp] of every rank -> [..., N] in the order of ranks."""
        return self.gather(part).movedim(0, -2).flatten(-2)


@dataclass(frozen=True)
class RowReduction:
    """The sum of partial products over parts of K.

    In order: the partial products over `num_blocks` fixed blocks on each rank, each rounded to the activations' dtype,
    are gathered by every rank and added in fp32 from the first block to the last, then the bias is added, and the sum
    rounded once. Every division of the blocks among ranks gives the same bits. Not in order: one partial product a
    rank, an all-reduce, and the bias.
    """

    in_order: bool
    num_blocks: int  # of this rank
    ranks: StageRanks

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        """Multiply x [M, K / tp] by weight [N, K / tp] and add bias [N] of the whole -> [M, N], on every rank. No
        autograd."""
        return self.sum(block_partials(x, weight, product, self.num_blocks), bias)

    def sum(self, partials: Tensor, bias: Tensor | None) -> Tensor:
        """Add partials [num_blocks, M, N] of all ranks, and bias [N] or [M, N] -> [M, N]."""
        ranks = self.ranks
        if ranks.memory is not None and partials.dtype in (torch.float32, torch.bfloat16):
            return ranks.memory.add(partials, bias)
        if self.in_order:
            return add_blocks(ranks.gather(partials).flatten(0, 1), bias)
        total = partials[0].contiguous()
        if ranks.group is not None:
            dist.all_reduce(total, group=ranks.group)
        return total if bias is None else (total + bias).to(total.dtype)


class GatheredColumns:
    """The forward of a layer of which each rank has some columns: it gathers them, except inside `left_out()`."""

    def __init__(self, forward: Callable[[Tensor], Tensor], part: range, ranks: StageRanks) -> None:
        """Take the forward of this rank's columns, which are those of `part`."""
        self._forward, self.part, self._ranks = forward, part, ranks
        self._is_left_out = False

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [..., N], or this rank's [..., N / tp] where the gather is left out."""
        out = self._forward(x)
        return out if self._is_left_out else self._ranks.gather_columns(out)

    def gather(self, part: Tensor) -> Tensor:
        """Gather the tensors of all ranks, equal in shape: [tp, *part.shape]."""
        return self._ranks.gather(part)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the gather out. All ranks do so for the same forward."""
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False


@dataclass(frozen=True)
class VocabularyLookup:
    """F.embedding of a matrix of which this rank has the rows from `first` on."""

    first: int
    ranks: StageRanks

    def __call__(self, ids: Tensor, rows: Tensor, *_: object, **__: object) -> Tensor:
        """Look up ids [...] in rows [V / tp, N] -> [..., N], bit for bit as in the whole matrix.

        Each rank brings its rows and zeros for the others. They are added as integers: each word comes from one rank,
        so not even the sign of a zero is lost. Through shared memory a row is taken from the rank that has it.
        """
        local = ids - self.first
        if self.ranks.memory is not None:
            flat, mine = ids.reshape(-1), rows.shape[0]
            found = self.ranks.gather(F.embedding(local.reshape(-1).clamp(0, mine - 1), rows))
            owner = flat.div(mine, rounding_mode="floor")
            return found[owner, torch.arange(len(flat))].view(*ids.shape, -1)
        is_mine = (local >= 0) & (local < rows.shape[0])
        found = F.embedding(local.clamp(0, rows.shape[0] - 1), rows)
        found = torch.where(is_mine.unsqueeze(-1), found, torch.zeros_like(found)).contiguous()
        words = torch.int32 if found.shape[-1] * found.itemsize % 4 == 0 else torch.uint8
        dist.all_reduce(found.view(words), group=self.ranks.group)
        return found
