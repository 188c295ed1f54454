"""The part of each tensor that a rank holds: plain values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]  # half-open


@dataclass(frozen=True)
class Shard:
    """A part of one tensor, cut along one dimension.

    Example: rank 1 of 2 holds of a packed gate|up matrix [8, 4] the second half of each half:
    `Shard(full_shape=(8, 4), dim=0, ranges=((2, 4), (6, 8)))`.
    """

    full_shape: tuple[int, ...]
    dim: int  # the dimension that is cut; 0 for a whole tensor
    ranges: tuple[Range, ...]  # of that dimension, concatenated in this order

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Shard:
        return cls(tuple(shape), 0, ((0, shape[0] if shape else 1),))

    @property
    def is_whole(self) -> bool:
        return not self.full_shape or self.ranges == ((0, self.full_shape[self.dim]),)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if not self.full_shape:
            return ()
        size = sum(stop - start for start, stop in self.ranges)
        return (*self.full_shape[: self.dim], size, *self.full_shape[self.dim + 1 :])
