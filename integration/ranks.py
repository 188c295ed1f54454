"""This process's place among the job's ranks, as a value that is passed."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from .activity import Activity
from .collective_watch import BACKSTOP_S, CollectiveWatch

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's rank, the number of ranks, its device, and its work, which the other ranks are told."""

    rank: int
    num_ranks: int
    device: torch.device
    activity: Activity = field(default_factory=Activity, kw_only=True, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, value: float) -> float:
        """Return the sum of one number over all ranks, on every rank."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """Return the largest of one number over all ranks, on every rank."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def in_turn(self, own: Sequence[T]) -> list[T]:
        """Return the things of all ranks on the first one: one of each rank, then the next of each; [] on the others.
        All ranks call it together. own: picklable, as many on every rank, or one more on the first ranks."""
        if self.num_ranks == 1:
            return list(own)
        found: list[Sequence[T]] | None = [()] * self.num_ranks if self.is_first else None
        dist.gather_object(own, found, dst=0)
        if found is None:
            return []
        return [found[index % self.num_ranks][index // self.num_ranks] for index in range(sum(map(len, found)))]

    def of_all(self, own: T) -> list[T]:
        """Return the things of all ranks, in their order, on every rank. All ranks call it together. own: picklable."""
        found: list[T | None] = [None] * self.num_ranks
        if self.num_ranks == 1:
            return [own]
        dist.all_gather_object(found, own)
        return [cast(T, one) for one in found]

    def first_alone(self, write: Callable[[], None]) -> None:
        """Let the first rank write files, while the others wait. All ranks call it together. Raises the first one's
        OSError there; the others go on."""
        try:
            if self.is_first:
                write()
        except OSError:
            self.meet()
            raise
        self.meet()

    def meet(self) -> None:
        """Wait until all ranks have come here, also while one of them does long work of its own, which goes on. Inside
        `process_group`; call it before collectives that a rank may come to late."""
        if self.activity.meeting is not None:
            self.activity.meeting()

    def _reduce(self, value: float, op: dist.ReduceOp.RedOpType) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.item()


def is_launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def this_rank(device: str = "") -> Ranks:
    """Read this process's rank from torchrun's environment; a process without it is rank 0 of 1. Joins no group.

    Raises ValueError for a CUDA device where there is none, and where this machine has more ranks than GPUs.
    """
    rank, num_ranks = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if is_launched() else (0, 1)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"engine.device is {device!r}, but this machine has no CUDA device")
    if device == "cuda" or (not device and torch.cuda.is_available()):
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ValueError(
                f"each rank needs its own GPU: rank {local_rank} of this machine has none, for there are {num_gpus}: "
                f"start at most {num_gpus} here (--nproc-per-node), or set engine.device=cpu"
            )
        return Ranks(rank, num_ranks, torch.device("cuda", local_rank))
    return Ranks(rank, num_ranks, torch.device(device or "cpu"))


@contextmanager
def process_group(ranks: Ranks, timeout_s: int, *, watches: bool = True, setting: str = "") -> Iterator[None]:
    """Open the job's default process group for the block: NCCL on GPUs, gloo on CPUs. A collective that waits longer
    than `timeout_s` fails on every rank that waits; by gloo it ends the process with the name of the rank that does not
    come, and neither time in which this process was stopped counts, nor time in which the work of that rank goes on
    (`collective_watch`). By NCCL so does `Ranks.meet` alone. watches: whether it does so; if not, gloo's own timeout
    counts. setting: the name of `timeout_s` for people.

    An object that holds the group beyond this block can hang the process: gloo's threads take the GIL to drop a tensor,
    and a group that ends with the object that holds it, for example a DDP module, joins them without releasing the GIL.
    Therefore locals of functions that have returned are freed inside the block, also those of an exception's frames.
    """
    store = None if is_launched() else dist.HashStore()
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    watch = None
    if watches and ranks.num_ranks > 1:
        by_nccl = backend == "nccl"
        watch = CollectiveWatch(
            ranks.rank, ranks.num_ranks, timeout_s, ranks.activity, setting=setting, has_deadlines=by_nccl
        )
        if not by_nccl:
            _set_timeout(max(timeout_s, BACKSTOP_S))  # not before: ranks may not come to the first collectives
        ranks.activity.meeting = watch.meet
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        if watch is not None:
            ranks.activity.meeting = None
            watch.close()
        gc.collect()
        dist.destroy_process_group()


def _set_timeout(timeout_s: int) -> None:
    """Set the timeout of the default group's coming collectives."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
