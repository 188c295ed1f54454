"""The destination of an update's bytes: the operations of a receiver on the tensors that it fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..manifest import TensorSpec
from .shard_bytes import ShardBytes


class Sink(Protocol):
    """The tensors of one update, written by name and byte range, in any order. A `WeightTransaction` is one.

    A receiver calls `expect` before its first byte, then per range either `destination`, whose bytes it overwrites
    itself, or `write`; or `write_elements` for the changed elements of a tensor. If it raises, its writes are undone:
    no transfer into a lent destination may be running by then.

    All byte offsets are multiples of `bucket.ALIGNMENT`; a range ends at such a multiple or at the tensor's end.
    """

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        """Check the tensors of an update before its first byte. Changes nothing.

        Raises ValueError listing every unknown or duplicate name, and every shape and dtype that differs from the
        resident tensor's.
        """

    def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
        """Return the resident bytes of this range, for the caller to overwrite: a uint8 view [num_bytes].

        Their present content is recorded for undo first; from here on the range counts as written. Returns None if they
        cannot be lent (the tensor is not contiguous, or was written already under its other name): receive into a
        buffer and `write` that; nothing was recorded then.
        """

    def write(self, name: str, offset: int, data: Tensor) -> None:
        """Overwrite bytes of a tensor from `offset`. data: uint8 [n] on any device; it is read before this returns."""

    def write_elements(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Overwrite single elements; every element of the tensor counts as written.

        positions: int64 [n] into the flattened tensor, no position twice. values: [n] of the tensor's dtype, or of an
        integer dtype of the same size that holds the same bits.
        """

    def held(self, name: str) -> ShardBytes:
        """Return the tensor as it is here now, to read only: for digests, and as the base of a difference."""

    def leave_unchecked(self, name: str, why: str) -> None:
        """Mark a tensor whose written bytes could not be checked here, because this rank does not hold all of it.

        It must be compared with the sender's digest before it counts.
        """
