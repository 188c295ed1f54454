"""The comparison in `lockstep bench sync`: plain copies, hashes, broadcasts of the same bytes by the same processes.

No code of weight_sync is used here. A model's parameters lie in one block of memory, so that "all bytes" is one tensor.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from .presets import load_model

HOST = "127.0.0.1"
_ALIGNMENT = 64


def flat_model(name: str) -> tuple[PreTrainedModel, Tensor]:
    """Load a bfloat16 model whose parameters are views of one block, uint8 [bytes]. Raises as `load_model`."""
    model = load_model(name)
    offsets, end = [], 0
    for parameter in model.parameters():  # tied parameters come once
        offsets.append(end)
        end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(end, dtype=torch.uint8)
    for parameter, start in zip(model.parameters(), offsets, strict=True):
        view = block[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = view.copy_(parameter.data)
    return model, block


class RawEnd:
    """One process's side of the plain copies, over the block of its model. Rank 0 sends, and makes the segment."""

    def __init__(self, model: PreTrainedModel, block: Tensor) -> None:
        self.block = block
        self._tensors = [p.detach().reshape(-1).view(torch.uint8).numpy() for p in model.parameters()]
        self._group: Any = None  # a dist.ProcessGroupGloo, whose types lack `broadcast`
        self._stores: tuple[dist.Store, ...] = ()
        self._segment: Tensor | None = None
        self._scratch: Tensor | None = None

    def join(self, port: int, rank: int, limit_s: float) -> None:
        """Join a gloo group of two."""
        limit = timedelta(seconds=limit_s)
        host = dist.TCPStore(HOST, port, 2, rank == 0, limit, wait_for_workers=False)
        store = dist.PrefixStore("raw", host)
        self._stores = (host, store)
        self._group = dist.ProcessGroupGloo(store, rank, 2, limit)

    def broadcast(self) -> None:
        """Broadcast all bytes from rank 0 in one call."""
        assert self._group is not None
        self._group.broadcast(self.block, 0).wait()

    def attach(self, path: str, create: bool = False) -> None:
        """Map a file of shared memory for all bytes; the creator touches every page."""
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        if create:
            os.posix_fallocate(file, 0, self.block.numel())
        self._segment = torch.frombuffer(mmap.mmap(file, self.block.numel()), dtype=torch.uint8)
        os.close(file)

    def write_segment(self) -> float:
        """Copy all bytes into the segment; returns the seconds."""
        assert self._segment is not None
        return _timed_copy(self._segment, self.block)

    def read_segment(self) -> float:
        """Copy all bytes out of the segment; returns the seconds."""
        assert self._segment is not None
        return _timed_copy(self.block, self._segment)

    def memcpy(self) -> float:
        """Copy all bytes to warm private memory; returns the seconds."""
        if self._scratch is None:
            self._scratch = self.block.clone()
        return _timed_copy(self._scratch, self.block)

    def hash(self, num_threads: int = 2) -> float:
        """Hash every tensor with hashlib's SHA-256, the largest first; returns the seconds."""
        started = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda data: hashlib.sha256(data).digest(), sorted(self._tensors, key=len, reverse=True)))
        return time.perf_counter() - started


def _timed_copy(destination: Tensor, source: Tensor) -> float:
    started = time.perf_counter()
    destination.copy_(source)
    return time.perf_counter() - started


def restart_peak() -> dict[str, int]:
    """Reset the peak of this process's memory to its present value; returns `memory`."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory()


def memory() -> dict[str, int]:
    """Read the bytes of this process: resident, their peak since `restart_peak`, and mapped shared memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"resident": "VmRSS", "peak": "VmHWM", "shared": "RssShmem"}
    return {name: int(fields[field].split()[0]) << 10 for name, field in names.items()}
