"""The plan of an update: which broadcasts carry its tensors, in which order. Both ends compute it and compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..layout.bucket import DEFAULT_BUCKET_BYTES, BucketPlan, plan_buckets
from ..manifest import Manifest, TensorSpec, dtype_name
from .weight_group import WeightGroup

PROTOCOL = 2
DIRECT_BYTES = 1 << 20  # a tensor of this size is sent from its own memory; below it, one more broadcast costs more
PACKED_BYTES = 16 << 20  # smaller tensors share buffers of this size; larger buffers do not fit the cache


@dataclass(frozen=True)
class TransferPlan:
    """The values on which two ends have to agree before the first byte."""

    group_name: str
    world_size: int
    bucket_bytes: int
    manifest: Manifest
    broadcasts: tuple[BucketPlan, ...]

    cut_digest: str  # SHA-256 over order, names, shapes, dtypes, and the cuts between broadcasts

    @classmethod
    def of(cls, group: WeightGroup, manifest: Manifest, bucket_bytes: int) -> TransferPlan:
        broadcasts, cut_digest = _cut(tuple(manifest.tensors), bucket_bytes)
        return cls(group.name, group.world_size, bucket_bytes, manifest, broadcasts, cut_digest)

    @property
    def digest(self) -> str:
        """SHA-256 over `cut_digest`, group and bucket size."""
        fields = [PROTOCOL, self.group_name, self.world_size, self.bucket_bytes, self.cut_digest]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(
            {
                "protocol": PROTOCOL,
                "group": self.group_name,
                "world_size": self.world_size,
                "bucket_bytes": self.bucket_bytes,
                "digest": self.digest,
                "version": self.manifest.version,
                "digests": dict(self.manifest.digests),
                "model_digest": self.manifest.model_digest,
                "tensors": _tensors_json(tuple(self.manifest.tensors)),
            }
        )


# The tensors of one model are the same at every update, so they are written, read and cut only once.
@lru_cache(maxsize=4)
def _tensors_json(specs: tuple[TensorSpec, ...]) -> str:
    return Manifest(None, specs).to_json()


@lru_cache(maxsize=4)
def tensors_of(text: str) -> tuple[TensorSpec, ...]:
    """Read the tensors of a plan, as `TransferPlan.to_json` writes them."""
    return Manifest.from_json(text).tensors


@lru_cache(maxsize=4)
def _cut(specs: tuple[TensorSpec, ...], bucket_bytes: int) -> tuple[tuple[BucketPlan, ...], str]:
    """Return the broadcasts of these tensors, and a digest of them."""
    broadcasts = plan_broadcasts(specs, bucket_bytes)
    pieces = [[(p.name, p.tensor_offset, p.bucket_offset, p.num_bytes) for p in b.pieces] for b in broadcasts]
    fields = [[(s.name, dtype_name(s.dtype), s.shape) for s in specs], pieces]
    return broadcasts, hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def plan_broadcasts(specs: Sequence[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[BucketPlan, ...]:
    """Plan the broadcasts of these tensors, in order.

    A broadcast is ready as soon as the last of its tensors has come, where tensors come in order. Tensors of
    DIRECT_BYTES or more are cut into pieces of at most bucket_bytes, each a broadcast of its own that needs no copy at
    either end. Smaller ones are packed together in their order, also across the large ones between them.
    """
    large = [spec for spec in specs if spec.num_bytes >= min(DIRECT_BYTES, bucket_bytes)]
    small = [spec for spec in specs if spec.num_bytes < min(DIRECT_BYTES, bucket_bytes)]
    plans = [*plan_buckets(small, min(PACKED_BYTES, bucket_bytes))]
    for spec in large:
        plans += plan_buckets([spec], bucket_bytes)
    order = {spec.name: index for index, spec in enumerate(specs)}
    plans.sort(key=lambda plan: (order[plan.pieces[-1].name], plan.pieces[-1].tensor_offset))
    return tuple(BucketPlan(index, plan.num_bytes, plan.pieces) for index, plan in enumerate(plans))
