"""The KV tensors and their size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...kernels.machine.huge_pages import use_huge_pages
from ..config import KVSize
from ..errors import OutOfMemory
from ..model.layer_probe import KVShape
from ..model.memory import is_out_of_memory
from .host_memory import available_host_bytes

_AUTO_FRACTION = {"cpu": 0.25, "cuda": 0.85}  # of the free memory; other processes share a host's memory


@dataclass(frozen=True)
class KVPlan:
    """The size of a pool, and the reason for it."""

    num_blocks: int
    bytes_per_block: int
    reason: str

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def plan_kv_pool(
    size: KVSize,
    shapes: list[KVShape],
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
    num_other_bytes: int = 0,
) -> KVPlan:
    """Compute the number of blocks for the configured size. Raises ValueError when that is less than one block.

    num_other_bytes: of the state pool, which shares the memory of a pool of automatic size.
    """
    per_block = block_size * bytes_per_token(shapes)
    if size.num_blocks:
        return KVPlan(size.num_blocks, per_block, f"{size.num_blocks} blocks, as configured")
    if size.num_bytes and per_block:
        if size.num_bytes < per_block:
            raise ValueError(f"kv_cache of {size.num_bytes} bytes is less than one block of {per_block}")
        return KVPlan(size.num_bytes // per_block, per_block, f"{size.num_bytes} bytes, as configured")
    usable = usable_bytes(device) - num_other_bytes
    wanted = max_num_seqs * -(-max_model_len // block_size)
    num_blocks = max(min(wanted, usable // per_block), 1) if per_block else wanted  # a stage may have no attention
    share = f"{_AUTO_FRACTION[device.type]:.0%} of the memory free on {device}"
    reason = (
        f"{max_num_seqs} sequences of {max_model_len} tokens fit in {share}"
        if num_blocks == wanted
        else f"{share} ({usable / 2**30:.1f} GiB)"
    )
    return KVPlan(num_blocks, per_block, reason)


def bytes_per_token(shapes: Iterable[KVShape]) -> int:
    """Return the bytes of one token in a cache with these layers."""
    return sum(shape.num_bytes for shape in shapes)


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that pools of an automatic size may take on the device."""
    return int(_free_bytes(device) * _AUTO_FRACTION[device.type])


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_host_bytes()


class KVCache:
    """One tensor of keys and one of values per layer, [num_blocks, block_size, num_kv_heads, dim], and one of the keys
    of its indexer, [num_blocks, block_size, dim], of width 0 where it has none.

    A page of memory is used only after its first write, so a large pool costs nothing until then.
    """

    def __init__(self, plan: KVPlan, shapes: list[KVShape], block_size: int, device: torch.device) -> None:
        self._plan, self._shapes, self.block_size, self._device = plan, shapes, block_size, device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.index_keys: list[Tensor] = []
        self.num_releases = 0  # between two of them the tensors stay where they are
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return bool(self.keys)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool, which a release keeps."""
        return self._plan.num_blocks

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, keys and values first."""
        return [*self.keys, *self.values, *self.index_keys]

    def allocate(self) -> None:
        """Create the tensors. Does nothing when they exist. Raises OutOfMemory; then none exists, and a later call may
        succeed."""
        if self.is_allocated:
            return
        rows = (self._plan.num_blocks, self.block_size)
        keys, values, index_keys = [], [], []
        try:
            for shape in self._shapes:
                make = partial(torch.empty, device=self._device)
                keys.append(make(*rows, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype))
                values.append(make(*rows, shape.num_kv_heads, shape.value_dim, dtype=shape.dtype))
                index_keys.append(make(*rows, shape.index_dim, dtype=shape.index_dtype))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"the KV pool of {self._plan.num_blocks} blocks, {self._plan.num_bytes / 2**20:.1f} MiB "
                f"({self._plan.reason}), cannot be allocated on {self._device}: free memory and try again, or set a "
                "smaller EngineConfig.kv_cache"
            ) from error
        self.keys, self.values, self.index_keys = keys, values, index_keys
        use_huge_pages(self.tensors, now=False)

    def release(self) -> None:
        """Drop the tensors. Their memory stays until the last reader drops them too."""
        self.num_releases += 1
        self.keys, self.values, self.index_keys = [], [], []
