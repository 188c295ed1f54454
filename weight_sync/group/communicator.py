"""NCCL communicators, also those whose unique id another program has made, as vLLM's trainers do.

torch's `ProcessGroupNCCL` makes both. Every rank but 0 reads the id of its group's first communicator from the group's
store, under the key "0" (torch 2.11 to 2.13): a store of this process that holds the trainer's id there makes torch
join the trainer's communicator. To the other ranks it is a rank that called ncclCommInitRank. Rank 0 makes the id
itself and sets that key, so that a store of ours can pass it on.

torch.cuda.nccl.init_rank would take the id as it is, but such a communicator cannot be aborted: a broadcast whose
sender is gone would occupy the GPU until the process ends. A process group has deadlines and an abort.

While ranks are missing, NCCL's own call blocks (`config.blocking`; the other mode has hung in released versions of
NCCL) and cannot be aborted: run it in a thread that may be left. It ends when the process that made the id does.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..deadline import Deadline
from ..pickles.unique_id import ID_BYTES
from .weight_group import Backend, Lane, Running

_ID_KEY = "0"
_ABORT_S = 30.0  # the longest time that an abort may take; it takes milliseconds
_RANKS_PER_ROOT = "128"  # torch's default
_environment = threading.Lock()


@dataclass(frozen=True)
class Connected:
    """A communicator that has all its ranks."""

    lane: Lane
    store: dist.Store  # that of its group: torch holds no reference to a Python store


class Communicators(Protocol):
    """A library that makes communicators of one device. `NcclCommunicators` is the one that trainers need."""

    @property
    def backend(self) -> Backend: ...
    @property
    def device(self) -> torch.device: ...

    def connect(self, unique_id: bytes, rank: int, world_size: int, deadline: Deadline) -> Connected:
        """Connect as a rank other than 0. Blocks until all ranks are there. Raises RuntimeError where NCCL does."""

    def host(self, publish: Callable[[bytes], None], world_size: int, deadline: Deadline) -> Connected:
        """Connect as rank 0, which makes the id and calls `publish` with it before it waits for the others."""


class NcclCommunicators:
    """NCCL's communicators of one GPU. A machine with a single GPU can only have one of a single rank: NCCL refuses two
    ranks on one GPU. All ranks need the same version of NCCL, which NCCL checks."""

    backend: Backend = "nccl"

    def __init__(self, device: torch.device) -> None:
        """Check the device. Raises ValueError where it is no GPU with an index, or torch has no NCCL."""
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"device {device} is not a CUDA device with an index, which NCCL needs")
        if not dist.is_nccl_available():
            raise ValueError("this build of torch has no NCCL")
        self.device = device

    def connect(self, unique_id: bytes, rank: int, world_size: int, deadline: Deadline) -> Connected:
        """Connect as a rank other than 0; see `Communicators.connect`. Raises ValueError for more ranks than torch
        connects by a single id."""
        _check_single_id(world_size)
        store = dist.HashStore()
        store.set(_ID_KEY, unique_id)  # type: ignore[arg-type]  # accepts bytes too
        return Connected(nccl_lane(store, rank, world_size, self.device), store)

    def host(self, publish: Callable[[bytes], None], world_size: int, deadline: Deadline) -> Connected:
        """Connect as rank 0; see `Communicators.host`. Raises as `connect`."""
        _check_single_id(world_size)
        store = _Publication(publish)
        return Connected(nccl_lane(store, 0, world_size, self.device), store)


class NcclLane:
    """torch's NCCL group with the operations that a weight group uses, whose waits end at the caller's deadline."""

    def __init__(self, group: dist.ProcessGroupNCCL) -> None:
        self._group = cast(Lane, group)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions, /) -> Running:
        """Start a broadcast."""
        started = time.monotonic()
        return _TimedWork(self._group.broadcast(tensors, options), started)

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions, /) -> Running:
        """Start a sum over all ranks."""
        started = time.monotonic()
        return _TimedWork(self._group.allreduce(tensors, options), started)

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Running:
        """Start to receive from one rank."""
        started = time.monotonic()
        return _TimedWork(self._group.recv(tensors, rank, tag), started)

    def abort(self) -> None:
        """End running operations, which then look as if they had succeeded. Any thread may call."""
        self._group.abort()


def nccl_lane(store: dist.Store, rank: int, world_size: int, device: torch.device) -> NcclLane:
    """Connect a rank with all others over NCCL, now and not at the first broadcast, so that a rank that never comes
    makes the rendezvous fail. Blocks until all ranks are there."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_ABORT_S)  # of aborts alone: every operation is waited for with its own
    options.config.blocking = 1
    with _without_watchdog():
        made = dist.ProcessGroupNCCL(store, rank, world_size, options)
    made.eager_connect_single_device(device)
    return NcclLane(made)


def unique_id_of(text: str) -> bytes:
    """Decode a unique id from standard base64. Raises ValueError for other text, and for another length."""
    try:
        unique_id = base64.b64decode(text, validate=True)
    except ValueError as error:  # binascii.Error is one; so is text that is not ASCII
        raise ValueError(f"is not standard base64 ({error})") from error
    if len(unique_id) != ID_BYTES:
        raise ValueError(f"must be base64 of {ID_BYTES} bytes; these are {len(unique_id)}")
    return unique_id


class _TimedWork:
    """An operation of NCCL. torch counts the timeout of a wait from the operation's start, not from the wait's."""

    def __init__(self, work: Running, started: float) -> None:
        self._work, self._started = work, started

    def wait(self, timeout: timedelta, /) -> bool:
        """Wait until the operation is done, at most for `timeout` from now. Raises RuntimeError as torch does."""
        return self._work.wait(timeout + timedelta(seconds=time.monotonic() - self._started))


class _Publication(dist.Store):
    """The store of rank 0, to which torch says the id that it has made."""

    def __init__(self, publish: Callable[[bytes], None]) -> None:
        super().__init__()
        self._publish = publish

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch passes bytes, not str
        assert key == _ID_KEY, f"torch sets the key {key!r} where it should say a unique id"
        self._publish(bytes(value))


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make a group of NCCL without torch's watchdog: its failures are raised by waits, and nowhere else.

    The watchdog ends the whole process after an operation has failed or is late, here a server that has taken its
    update back already. torch reads this setting from the environment when a group is constructed.
    """
    with _environment:
        before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
            else:
                os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before


def _check_single_id(world_size: int) -> None:
    """Raise ValueError for a group that torch would connect by several unique ids, of which other programs have one."""
    most = int(os.environ.get("TORCH_NCCL_RANKS_PER_ROOT", _RANKS_PER_ROOT))
    if world_size > most:
        raise ValueError(
            f"world_size {world_size}: torch connects more than {most} ranks by several NCCL ids, and the trainer has "
            f"one; set TORCH_NCCL_RANKS_PER_ROOT={world_size} for this process"
        )
