"""Every transport for pushes of a small model, in several buckets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.weight_sync.transports.delta import DeltaTransport
from lockstep.weight_sync.transports.disk import DiskTransport
from lockstep.weight_sync.transports.group import DistributedTransport
from lockstep.weight_sync.transports.same_host import TensorTransport
from lockstep.weight_sync.transports.transport import Transport

BUCKET = 1 << 16  # several buckets for a small model
TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "distributed": lambda folder: DistributedTransport(bucket_bytes=BUCKET),
    "tensor": lambda folder: TensorTransport(bucket_bytes=BUCKET, folder=folder),
    "disk": DiskTransport,
    "delta over distributed": lambda folder: DeltaTransport(DistributedTransport(bucket_bytes=BUCKET)),
    "delta over tensor": lambda folder: DeltaTransport(TensorTransport(bucket_bytes=1 << 12, folder=folder)),
    "delta over disk": lambda folder: DeltaTransport(DiskTransport(folder)),
}
