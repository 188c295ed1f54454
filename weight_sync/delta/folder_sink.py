"""A sink that writes an update into the files of a checkpoint folder, so that a delta can be applied to them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..disk.folder import DiskPlan
from ..disk.safetensors_file import StoredTensor
from ..layout.shard_bytes import ShardBytes
from ..manifest import TensorSpec


class FolderSink:
    """A `Sink` over the files of a checkpoint folder, written in place through memory maps. Nothing can be undone."""

    def __init__(self, plan: DiskPlan) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        for name in plan.files:
            with open(plan.folder / name, "r+b") as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0)
        self._tensors: dict[str, StoredTensor] = {tensor.spec.name: tensor for tensor in plan.tensors}

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        """Raise ValueError listing every tensor that the folder does not have with this shape and dtype."""
        wrong = [s.describe() for s in specs if s.name not in self._tensors or self._tensors[s.name].spec != s]
        if wrong:
            raise ValueError(f"the folder has no {'; '.join(wrong)}")

    def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
        """Return the bytes of this range in the file, uint8 [num_bytes]."""
        return torch.from_numpy(self._bytes(name)[offset : offset + num_bytes])

    def write(self, name: str, offset: int, data: Tensor) -> None:
        """Overwrite bytes in the file."""
        self._bytes(name)[offset : offset + data.numel()] = data.cpu().numpy()

    def write_elements(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Overwrite elements in the file. Uses numpy, because a tensor of a file need not be aligned to its dtype."""
        if positions.numel():
            word = np.dtype(f"u{values.itemsize}")
            self._bytes(name).view(word)[positions.numpy()] = values.view(torch.uint8).numpy().view(word)

    def resident(self, name: str) -> Tensor:
        """Return the tensor as it is in the file: a view of the map where it is aligned, else a copy."""
        data = torch.from_numpy(self._bytes(name))
        spec = self._tensors[name].spec
        if data.data_ptr() % spec.dtype.itemsize:
            data = data.clone()
        return data.view(spec.dtype).reshape(spec.shape)

    def held(self, name: str) -> ShardBytes:
        """Return the whole tensor; see `Sink.held`."""
        return ShardBytes(name, self.resident(name))

    def leave_unchecked(self, name: str, why: str) -> None:
        """Raise ValueError: files hold whole tensors, so everything can be checked."""
        raise ValueError(f"{name}: {why}")

    def flush(self) -> None:
        """Flush the written bytes to the disk."""
        for map_ in self._maps.values():
            map_.flush()

    def _bytes(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return np.frombuffer(self._maps[tensor.file], np.uint8, tensor.spec.num_bytes, tensor.offset)
