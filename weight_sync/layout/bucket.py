"""Buckets of tensor bytes, planned by a pure function.

    bucket 0            | bucket 1                      | bucket 2
    | a | b | c first   | c, the middle of a big tensor | c last | d | e |

Every piece starts at a multiple of `ALIGNMENT` bytes, in its bucket and in its tensor, so that it holds whole elements
of any dtype and can be viewed without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..manifest import TensorSpec

ALIGNMENT = 64  # bytes: a multiple of every element size, and of a cache line
DEFAULT_BUCKET_BYTES = 512 << 20

# bytes of an element -> integer dtype of the same size
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BucketPiece:
    """A byte range of one tensor, and its place in the bucket."""

    name: str
    tensor_offset: int  # bytes
    bucket_offset: int  # bytes
    num_bytes: int


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: pieces in order, with padding between them."""

    index: int
    num_bytes: int  # up to the end of the last piece
    pieces: tuple[BucketPiece, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces)


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[BucketPlan, ...]:
    """Assign tensors to buckets of at most `bucket_bytes`, in their order. Empty tensors become pieces of no bytes.

    Raises ValueError for a bucket size below the alignment.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes must be at least {ALIGNMENT}, not {bucket_bytes}")
    capacity = bucket_bytes // ALIGNMENT * ALIGNMENT
    plans: list[BucketPlan] = []
    pieces: list[BucketPiece] = []
    end = 0

    def close() -> None:
        nonlocal pieces, end
        plans.append(BucketPlan(len(plans), end, tuple(pieces)))
        pieces, end = [], 0

    for spec in specs:
        done = 0
        while True:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            # A tensor that would fit into a bucket of its own is not split to fill the rest of this one.
            left = spec.num_bytes - done
            if pieces and (start >= capacity or start + left > capacity >= left):
                close()
                continue
            size = min(left, capacity - start)
            pieces.append(BucketPiece(spec.name, done, start, size))
            end, done = start + size, done + size
            if done == spec.num_bytes:
                break
    if pieces:
        close()
    return tuple(plans)


def byte_view(tensor: Tensor) -> Tensor:
    """Return the raw bytes of a tensor, uint8 [num_bytes]: a view if it is contiguous, else a copy."""
    return flat_view(word_view(tensor.detach().resolve_conj().resolve_neg()).contiguous()).view(torch.uint8)


def flat_view(tensor: Tensor) -> Tensor:
    """View the elements of a contiguous tensor as a vector of stride 1, which can be viewed with a smaller dtype.

    A tensor of one element, or none, is contiguous whatever its strides are, and a slice may have given it others.
    """
    flat = tensor.reshape(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def word_view(tensor: Tensor) -> Tensor:
    """View the tensor with an integer dtype of the same size: torch can copy, compare and index all of these.

    A tensor without such a view is returned as it is: complex128, lazily conjugated or negated ones.
    """
    word = _WORDS.get(tensor.itemsize)
    return tensor if word is None or tensor.is_conj() or tensor.is_neg() else tensor.view(word)
