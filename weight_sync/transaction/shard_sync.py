"""Weight syncs of a rank that holds a part of its trainer's model.

The engine uses the trainer's own storage where both are sharded alike, else it copies this rank's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layout.shard_bytes import Shard
from ..manifest import NamedTensors, dtype_name
from .in_place import SyncRecord, is_same_memory, write_tensor


@dataclass(frozen=True)
class ShardSync:
    """The plan by which one of several ranks gets its part of the trainer's tensors."""

    pairs: tuple[tuple[str, Tensor, Tensor], ...]  # name, resident tensor, trainer's tensor
    shards: Mapping[str, Shard]
    aliases: bool  # the trainer's tensors are sharded as the resident ones are

    def run(self) -> SyncRecord:
        """Make the resident tensors use the trainer's storage, or copy this rank's part of it."""
        if self.aliases:
            for _, resident, theirs in self.pairs:
                if not is_same_memory(resident, theirs):
                    resident.data = theirs.detach()
            return SyncRecord(len(self.pairs), 0)
        num_bytes = sum(_copy_part(resident, theirs, self.shards.get(name)) for name, resident, theirs in self.pairs)
        return SyncRecord(len(self.pairs), num_bytes)


def plan_shard_sync(resident: NamedTensors, shards: Mapping[str, Shard], trainer: NamedTensors) -> ShardSync:
    """Plan the sync of a rank that holds a part of the model. Changes nothing.

    Nothing is copied where every tensor of the trainer is this rank's part in the same layout; else the parts are
    copied from whole tensors. A DTensor is compared by its placements; for a plain tensor of the part's shape the
    caller must make sure that it is this part. Raises ValueError listing every resident tensor that the trainer does
    not name, or has with another shape or dtype.
    """
    source = dict(trainer)
    pairs: list[tuple[str, Tensor, Tensor]] = []
    wrong: list[str] = []
    aliases = True
    for name, tensor in resident:
        shard, other = shards.get(name), source.get(name)
        if other is None:
            wrong.append(f"{name}: the trainer does not have it")
            continue
        theirs = _local(other, shard)
        full_shape = tuple(tensor.shape if shard is None else shard.full_shape)
        fits = theirs is not None and tuple(theirs.shape) in (full_shape, tuple(tensor.shape))
        if theirs is None or not fits or theirs.dtype != tensor.dtype:
            wrong.append(f"{name}: the trainer has {dtype_name(other.dtype)}{list(other.shape)} cut otherwise, here is "
                         f"{dtype_name(tensor.dtype)}{list(tensor.shape)} of {list(full_shape)}")  # fmt: skip
            continue
        is_alike = theirs.shape == tensor.shape and theirs.stride() == tensor.stride()
        aliases &= is_alike and theirs.device == tensor.device
        pairs.append((name, tensor, theirs))
    if wrong:
        raise ValueError(f"not this rank's part of the model, nor all of it: {'; '.join(wrong)}")
    return ShardSync(tuple(pairs), shards, aliases)


def _copy_part(resident: Tensor, theirs: Tensor, shard: Shard | None) -> int:
    if shard is None or theirs.shape == resident.shape:
        return write_tensor(resident, theirs)
    done = 0
    with torch.no_grad():
        for start, stop in shard.ranges:
            part = theirs.detach().narrow(shard.dim, start, stop - start)
            resident.narrow(shard.dim, done, stop - start).copy_(part)
            done += stop - start
    return resident.nbytes


def _local(tensor: Tensor, shard: Shard | None) -> Tensor | None:
    """Return a plain tensor as it is, a DTensor's local part if it equals the shard, else None."""
    if not isinstance(tensor, DTensor):
        return tensor
    cuts = [(placement, index) for index, placement in enumerate(tensor.placements)
            if not placement.is_replicate() and tensor.device_mesh.size(index) > 1]  # fmt: skip
    local = tensor.to_local()
    is_whole = shard is None or tuple(local.shape) == tuple(shard.full_shape)
    if not cuts:
        return local if is_whole else None
    (placement, index), *others = cuts
    ways, rank = tensor.device_mesh.size(index), tensor.device_mesh.get_local_rank(index)
    if others or shard is None or is_whole or not placement.is_shard(shard.dim) or tensor.shape[shard.dim] % ways:
        return None
    size = tensor.shape[shard.dim] // ways
    return local if shard.ranges == ((rank * size, (rank + 1) * size),) else None
