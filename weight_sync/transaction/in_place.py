"""Weight syncs without a copy: the engine's tensors use the trainer's own storage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class SyncRecord:
    """Record of one weight sync."""

    num_tensors: int
    bytes_copied: int


def write_tensor(resident: Tensor, incoming: Tensor) -> int:
    """Give `resident` the values of `incoming` and return the number of bytes copied: 0 where both are the same memory.
    Shapes and dtypes must agree."""
    if is_same_memory(resident, incoming):
        return 0
    with torch.no_grad():
        resident.copy_(incoming)
    return incoming.nbytes


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same elements at the same addresses and the same layout."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def sync_in_place(resident: NamedTensors, trainer: NamedTensors) -> SyncRecord:
    """Check, tensor by tensor, that an engine that aliases its trainer needs no copy, and return the record of the
    sync.

    trainer may name tied tensors more than once. Raises ValueError listing every resident tensor that the trainer does
    not name or stores elsewhere; then nothing was written.
    """
    source = dict(trainer)
    pairs = [(name, tensor, source.get(name)) for name, tensor in resident]
    wrong = [name for name, tensor, other in pairs if other is None or not is_same_memory(tensor, other)]
    if wrong:
        raise ValueError(f"not the trainer's own storage, so they cannot be committed in place: {', '.join(wrong)}")
    return SyncRecord(len(pairs), sum(write_tensor(tensor, other) for _, tensor, other in pairs if other is not None))
