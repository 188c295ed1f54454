"""The part of a tensor that a rank holds, addressed by the bytes of the whole tensor.

Every wire carries whole tensors, as byte ranges in row-major order; a rank keeps its own bytes of them. Its part has
its bytes in the same order, so that its bytes of a range are one range of its part:

    whole tensor [2, 4], cut along dim 1   | a b c d | e f g h |
    part of rank 1 of 2 (ranges (2, 4))    |     c d |     g h |   range [1, 7) of the whole is range [0, 3) of it

Letters used in shapes: R rows (one for each index of the dimensions before the cut one), B bytes of a row of the whole,
K bytes of a row of the part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..manifest import TensorSpec
from .flat_bytes import FlatBytes


class Shard(Protocol):
    """The part of a tensor that a rank holds: half-open ranges of one dimension, concatenated in their order."""

    @property
    def full_shape(self) -> tuple[int, ...]: ...

    @property
    def dim(self) -> int: ...

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]: ...


class ShardBytes:
    """A rank's part of a tensor, which may be all of it or nothing.

    spec: of the whole tensor. num_bytes: of the whole tensor. local: the part's own bytes. Offsets and positions are
    those of the whole tensor, unless they are called local.
    """

    def __init__(self, name: str, part: Tensor, shard: Shard | None = None) -> None:
        """Describe a part of a tensor. shard None: the part is the whole tensor.

        Raises ValueError if the part does not have the shard's shape or is not contiguous, or if the ranges are not in
        order or leave the tensor.
        """
        shape = tuple(part.shape) if shard is None else tuple(shard.full_shape)
        self.spec = TensorSpec(name, part.dtype, shape)
        self.num_bytes = self.spec.num_bytes
        self.local = FlatBytes(part)
        self.is_whole = shard is None or tuple(part.shape) == shape
        self._row_bytes, self._kept_bytes = self.num_bytes, self.num_bytes
        self._pieces: tuple[tuple[int, int, int], ...] = ((0, self.num_bytes, 0),)
        if shard is not None and not self.is_whole:
            _check(self.spec, part, shard)
            inner = math.prod(shape[shard.dim + 1 :]) * part.dtype.itemsize
            self._row_bytes, kept, pieces = shape[shard.dim] * inner, 0, []
            for start, stop in shard.ranges:  # in bytes of a row: start, stop, and offset in the part's row
                pieces.append((start * inner, stop * inner, kept))
                kept += (stop - start) * inner
            self._kept_bytes, self._pieces = kept, tuple(pieces)

    @classmethod
    def nothing(cls, spec: TensorSpec) -> ShardBytes:
        """Create the empty part of a tensor that other ranks hold."""
        held = cls(spec.name, torch.empty(0, dtype=spec.dtype))
        held.spec, held.num_bytes, held.is_whole = spec, spec.num_bytes, spec.num_bytes == 0
        held._row_bytes, held._kept_bytes, held._pieces = spec.num_bytes, 0, ()
        return held

    def local_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the local bytes that [start, stop) covers."""
        return (start, stop) if self.is_whole else (self._num_held_before(start), self._num_held_before(stop))

    def holds_all_of(self, start: int, stop: int) -> bool:
        """Return whether every byte of the range is in the part."""
        first, last = self.local_range(start, stop)
        return last - first == stop - start

    def lend(self, start: int, stop: int) -> Tensor | None:
        """Return the bytes of the range, uint8 [stop - start], for the caller to overwrite.

        Returns None if they are not one piece of memory of the part.
        """
        if self.local.bytes is None or not self.holds_all_of(start, stop):
            return None
        first, last = self.local_range(start, stop)
        return self.local.bytes[first:last]

    def write(self, start: int, data: Tensor) -> None:
        """Overwrite the part's bytes of the range from `start` by those of `data`, uint8 [n] on any device."""
        if self.is_whole:
            self.local.write(start, data)
            return
        for mine, theirs in self._pairs(start, data):
            mine.copy_(theirs)

    def read(self, start: int, out: Tensor) -> Tensor:
        """Copy the part's bytes of the range from `start` into `out`, uint8 [n]; returns it.

        Other bytes of `out` stay as they are.
        """
        if self.is_whole:
            return self.local.read(start, out)
        for mine, theirs in self._pairs(start, out):
            theirs.copy_(mine)
        return out

    def agrees_with(self, start: int, data: Tensor) -> bool:
        """Return whether the part's bytes of the range from `start` equal those of `data`, uint8 [n] on any device."""
        if self.is_whole:
            return self.local.holds(start, data)
        return all(torch.equal(mine, theirs.to(mine.device)) for mine, theirs in self._pairs(start, data))

    def local_elements(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of these elements, int64 [n], the part holds, bool [n], and their local positions, int64 [m]."""
        size = self.spec.dtype.itemsize
        held = torch.zeros(len(positions), dtype=torch.bool, device=positions.device)
        local = torch.zeros_like(positions)
        if self._row_bytes:
            rows = positions.div(self._row_bytes // size, rounding_mode="floor")
            columns = positions - rows * (self._row_bytes // size)
            for start, stop, kept in self._pieces:
                inside = (columns >= start // size) & (columns < stop // size)
                at = rows * (self._kept_bytes // size) + columns + (kept - start) // size
                local, held = torch.where(inside, at, local), held | inside
        return held, local[held]

    def _num_held_before(self, offset: int) -> int:
        if not self._row_bytes:
            return 0
        row, column = divmod(offset, self._row_bytes)
        return row * self._kept_bytes + sum(max(0, min(column, b) - a) for a, b, _ in self._pieces)

    def _pairs(self, start: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the part, each with the view of `data` of the same bytes: [n], or [R, n] for several rows at
        once."""
        assert self.local.bytes is not None
        mine, done = self.local.bytes, 0
        while done < data.numel() and self._pieces:
            row, column = divmod(start + done, self._row_bytes)
            num_rows = 0 if column else (data.numel() - done) // self._row_bytes
            size = num_rows * self._row_bytes or min(self._row_bytes - column, data.numel() - done)
            if num_rows:
                part = mine[row * self._kept_bytes : (row + num_rows) * self._kept_bytes].view(num_rows, -1)
                block = data[done : done + size].view(num_rows, -1)
                for a, b, kept in self._pieces:
                    yield part[:, kept : kept + b - a], block[:, a:b]
            else:
                for a, b, kept in self._pieces:
                    first, last = max(a, column), min(b, column + size)
                    if first < last:
                        at = row * self._kept_bytes + kept - a
                        yield (
                            mine[at + first : at + last],
                            data[done + first - column : done + last - column],
                        )
            done += size


def _check(spec: TensorSpec, part: Tensor, shard: Shard) -> None:
    size = spec.shape[shard.dim]
    edges = [edge for piece in shard.ranges for edge in piece]
    wrong = []
    if edges != sorted(edges) or (edges and (edges[0] < 0 or edges[-1] > size)):
        wrong.append(f"ranges {shard.ranges} of {size} along dim {shard.dim} are not in order")
    width = sum(stop - start for start, stop in shard.ranges)
    if tuple(part.shape) != (*spec.shape[: shard.dim], width, *spec.shape[shard.dim + 1 :]):
        wrong.append(f"the part is {list(part.shape)}, not {width} of dim {shard.dim}")
    if not part.is_contiguous():
        wrong.append("the part is not contiguous")
    if wrong:
        raise ValueError(f"{spec.describe()}: {'; '.join(wrong)}")
