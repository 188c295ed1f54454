"""Memory that the ranks of a stage share if they are processes of one host."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ...kernels.collectives.exchange import SharedMemory, exchange_bytes

logger = logging.getLogger(__name__)

_SHM = Path("/dev/shm")
_NAME_BYTES = 32


def open_stage_memory(group: dist.ProcessGroup, num_ranks: int, rank: int, timeout_s: float) -> SharedMemory | None:
    """Open memory that all ranks of the group share; None on all of them where one cannot. A collective of the group.

    The file has no name any more when this returns: it ends with the processes, however they end.
    """
    num_bytes = exchange_bytes(num_ranks)
    name = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    if rank == 0:
        name = torch.frombuffer(bytearray(uuid.uuid4().hex.encode()), dtype=torch.uint8)
    group.broadcast(name, 0).wait()
    path = (_SHM if _SHM.is_dir() else Path(tempfile.gettempdir())) / f"lockstep-{bytes(name.tolist()).decode()}"
    memory = None
    try:
        if rank == 0 and num_bytes is not None:
            memory = _opened(path, num_bytes, os.O_CREAT | os.O_EXCL)
        made = _all_have(group, memory is not None or rank != 0)
        if made and rank != 0 and num_bytes is not None:
            memory = _opened(path, num_bytes, 0)
        shared = _all_have(group, memory is not None)
    finally:
        if rank == 0:
            with suppress(FileNotFoundError):
                path.unlink()
    if not shared or memory is None:
        logger.info("the ranks of a stage share no memory: they exchange tensors by %s", group.name())
        return None
    return SharedMemory(memory, num_ranks, rank, timeout_s)


def _opened(path: Path, num_bytes: int, flags: int) -> mmap.mmap | None:
    """Map the file, and allocate it if the flags create it; None if it cannot be had, as on another host."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            if flags & os.O_CREAT:
                os.posix_fallocate(file, 0, num_bytes)  # full memory is an error here, and a crash at the first write
            return mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
    except OSError as error:
        logger.info("no shared memory at %s: %s", path, error)
        return None


def _all_have(group: dist.ProcessGroup, mine: bool) -> bool:
    vote = torch.tensor([int(mine)])
    dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
    return bool(vote)
