"""Every transport for pushes of a small model, in several buckets, and what stands after a push."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lockstep.integration.service import RolloutService
from lockstep.weight_sync.digests.model_digest import model_digest
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


def train(model: nn.Module, share: float = 0.05) -> None:
    """Change some of the elements."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.rand_like(parameter) < share) * 0.1)


def digest_of(model: nn.Module) -> str:
    return model_digest(model.named_parameters())


def standing(service: RolloutService) -> tuple[object, ...]:
    return service.engine.weight_version, service.model_digest()
