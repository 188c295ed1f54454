"""Process groups for moving weights, beside the default group (which need not exist); several may exist at once."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..deadline import Deadline
from ..errors import TransferFailed
from .sealed_store import sealed
from .shared_keys import SharedKeys

Backend = Literal["gloo", "nccl"]
JOIN_ANEW = "destroy the group and join a new one"  # the remedy for a group that is broken
_PROBE_S = 1.0  # for a machine to say that a port of its is closed


class Running(Protocol):
    """An operation that was started, such as torch's Work."""

    def wait(self, timeout: timedelta, /) -> bool:
        """Wait until it is done. Raises RuntimeError where it fails, or is not done in time."""


class Lane(Protocol):
    """The operations of torch's gloo and NCCL groups that a weight group uses. torch's type stubs omit them."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions, /) -> Running:
        """Start a broadcast."""

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions, /) -> Running:
        """Start a sum over all ranks."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Running:
        """Start to receive from one rank."""

    def abort(self) -> None:
        """End running operations."""


class WeightGroup:
    """One process group for weights. Made by `Joining.join`.

    name, rank, world_size, backend, device and has_secret describe the joined group. `broken` is None, or the reason
    why the group can no longer be used: when one operation fails or times out, gloo closes every connection of the
    group and NCCL its communicator, so a failed group cannot recover. A broken group refuses every use with that
    reason; destroy it and join a new one, on a new port.

    Where all ranks are ours, a gloo group has two lanes, each with its own connections, which broadcasts use in turns:
    one works while the other changes from one tensor to the next (tensors of 2 to 6 MB went at 0.9 of the rate of a
    single broadcast of all bytes over one lane, and at 1.0 to 1.5 over two, on two cores).
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        backend: Backend,
        device: torch.device,
        lanes: tuple[Lane, ...],
        stores: tuple[dist.Store, ...],
        secret: str | None = None,
    ) -> None:
        self.name, self.rank, self.world_size, self.backend, self.device = name, rank, world_size, backend, device
        self.has_secret = secret is not None
        self.broken: str | None = None
        self.num_updates = 0  # updates that this rank has taken part in; see protocol.py
        self.keys = SharedKeys(sealed(dist.PrefixStore(f"lockstep/{name}", stores[0]), secret, "updates"))
        self._lanes = lanes  # empty after `destroy`
        self._num_broadcasts = 0  # the same on all ranks that are in step
        self._stores = stores  # torch holds no reference to a Python store
        self._buffers: dict[int, Tensor] = {}
        self._num_under_way = 0

    def at(self, phase: str, tensor: str | None = None) -> str:
        """Describe the place of an error: rank, group, phase and tensor."""
        return f"rank {self.rank} of group {self.name!r}, {phase}" + (f", tensor {tensor}" if tensor else "")

    def has_lost_its_sender(self) -> bool:
        """Return whether rank 0 has ended, and its store with it: nothing listens at the store's address any more.
        False where that is not known, as of another machine that does not answer."""
        store = self._stores[0] if self._stores else None
        if self.rank == 0 or not isinstance(store, dist.TCPStore):
            return False
        try:
            socket.create_connection((store.host, store.port), timeout=_PROBE_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def check_usable(self) -> None:
        """Raise TransferFailed for a group that is broken or destroyed."""
        if self.broken is not None:
            raise TransferFailed(f"{self.at('not used')}: {self.broken}; {JOIN_ANEW}")

    def broadcast(self, tensor: Tensor, deadline: Deadline) -> Running:
        """Start a broadcast from rank 0, for `finish`. tensor: contiguous, on the group's device."""
        lanes = self._lanes  # before the check: `destroy` in another thread empties them after it broke the group
        self.check_usable()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        # gloo's Work.wait(timeout) only stops waiting, while the operation goes on writing. This timeout ends the
        # operation.
        options.timeout = deadline.left
        lane = lanes[self._num_broadcasts % len(lanes)]
        self._num_broadcasts += 1
        self._num_under_way += 1
        return lane.broadcast([tensor], options)

    def finish(self, work: Running, deadline: Deadline) -> None:
        """Wait until a broadcast is done: its bytes have arrived, or may be overwritten.

        Raises RuntimeError, as torch does. After the deadline gloo may still be working: call `abort`, and finish the
        remaining broadcasts, before the memory is used again.
        """
        self._num_under_way -= 1
        if not work.wait(deadline.left):
            raise RuntimeError("the operation did not succeed")
        if self.broken is not None:  # an operation of NCCL that is aborted ends as one that has succeeded
            raise RuntimeError(self.broken)

    def buffer(self, slot: int, num_bytes: int) -> Tensor:
        """Return staging memory, uint8 [num_bytes] on the group's device, kept from one update to the next."""
        kept = self._buffers.get(slot)
        if kept is None or kept.numel() < num_bytes:
            self._buffers.pop(slot, None)  # freed before the larger one is allocated
            kept = self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return kept[:num_bytes]

    def abort(self, reason: str = "it was aborted") -> None:
        """End running operations with an error, here and on every other rank. The group is broken afterwards.

        May be called from any thread.
        """
        if self.broken is None:
            self.broken = reason
        for lane in self._lanes if self.world_size > 1 else ():
            if self.backend == "nccl":
                lane.abort()
                continue
            # gloo's own abort leaves operations running. An operation that times out closes the connections of all of
            # them; if its rank is gone it fails instead, and closes nothing.
            for step in range(1, self.world_size):
                other = (self.rank + step) % self.world_size
                with contextlib.suppress(RuntimeError):
                    lane.recv([torch.empty(1, dtype=torch.uint8)], other, 0).wait(timedelta(milliseconds=1))

    def destroy(self) -> None:
        """Release everything: connections, the store where this rank hosts it, buffers. A second call does nothing."""
        if not self._lanes:
            return
        if self._num_under_way:
            self.abort("it was destroyed")
        self.broken = self.broken or "it was destroyed"
        self._lanes = ()
        self._buffers.clear()
        self.keys.close()
        self._stores = ()
