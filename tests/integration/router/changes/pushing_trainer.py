"""A trainer that pushes one version after the other, until it is killed.

    python -m lockstep.tests.integration.router.changes.pushing_trainer URL MODEL_FOLDER SEGMENTS_FOLDER FIRST_VERSION

says of each version how its push ended.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.weight_sync.transports.same_host import TensorTransport

PUSH_S = 20.0  # the limit of each wait of a push: a killed trainer is noticed far sooner


def weights(folder: Path, version: str) -> torch.nn.Module:
    """Return the model with the weights that this version has, whoever pushes it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(int(version))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.01)
    return model


def push_for_ever(url: str, folder: str, segments: str, first: str) -> None:
    """Push one version after the other, and say how each ended."""
    torch.set_num_threads(1)
    transport = TensorTransport(bucket_bytes=1 << 14, folder=segments)
    pusher = WeightPusher([HttpTarget(url)], transport, timeout_s=PUSH_S)
    for version in range(int(first), int(first) + 1000):
        try:
            pusher.push(weights(Path(folder), str(version)), str(version))
            print(f"{version} pushed", flush=True)
        except PushFailed as failed:
            print(f"{version} failed: {failed}", flush=True)


if __name__ == "__main__":
    push_for_ever(*sys.argv[1:])
