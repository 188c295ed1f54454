"""A trainer of vLLM on a CPU: its handshake, restated from the wire's description, and gloo in the place of NCCL.

Nothing of the handshake comes from the package under test: the store is torch's, made as vLLM's StatelessProcessGroup
makes it, the key and the pickle are written here. An id names the store of the communicator, as NCCL's ids name the
address of the process that made them.
"""

from __future__ import annotations

import ctypes
import pickle
import socket
import sys
import types
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.group.communicator import Connected
from lockstep.weight_sync.group.interface import gloo_group
from lockstep.weight_sync.group.weight_group import Backend

HOST = "127.0.0.1"
KEY = "broadcast_from/0/0"
PATIENCE = timedelta(seconds=30)
MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"


class ncclUniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


ncclUniqueId.__module__, ncclUniqueId.__qualname__ = MODULE, "ncclUniqueId"


def with_vllm_module(call: Callable[[], object]) -> object:
    """Call a function while vLLM's module of this structure can be imported."""
    parts = MODULE.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    try:
        for name in names:
            sys.modules[name] = types.ModuleType(name)
        sys.modules[MODULE].ncclUniqueId = ncclUniqueId  # type: ignore[attr-defined]
        return call()
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def pickled(unique_id: bytes, protocol: int | None = None) -> bytes:
    structure = ncclUniqueId.from_buffer_copy(unique_id)
    return with_vllm_module(lambda: pickle.dumps(structure, protocol))  # type: ignore[return-value]


def unpickled(data: bytes) -> bytes:
    """Load an id as vLLM's workers do: Python's unpickler, and the structure's class."""
    loaded = with_vllm_module(lambda: pickle.loads(data))
    assert type(loaded) is ncclUniqueId
    return bytes(loaded)


def id_of(port: int) -> bytes:
    return b"\xff\x80" + port.to_bytes(2, "big") + bytes(range(124))


class GlooCommunicators:
    """Communicators of gloo, for engines on a CPU that speak with such trainers."""

    backend: Backend = "gloo"
    device = torch.device("cpu")

    def connect(self, unique_id: bytes, rank: int, world_size: int, deadline: Deadline) -> Connected:
        store = dist.TCPStore(HOST, int.from_bytes(unique_id[2:4], "big"), None, False, deadline.left)
        return Connected(gloo_group(store, rank, world_size, HOST, deadline.left), store)

    def host(self, publish: Callable[[bytes], None], world_size: int, deadline: Deadline) -> Connected:
        store = dist.TCPStore(HOST, 0, None, True, deadline.left, wait_for_workers=False)
        publish(id_of(store.port))
        return Connected(gloo_group(store, 0, world_size, HOST, deadline.left), store)


class VllmTrainer:
    """Rank 0. `join` blocks until all workers are there."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._root = dist.TCPStore(HOST, 0, None, True, PATIENCE, wait_for_workers=False)
        self.unique_id = id_of(self._root.port)
        self.store: dist.TCPStore | None = None
        self.group: dist.ProcessGroupGloo | None = None

    @property
    def init_info(self) -> dict:
        return {"master_address": HOST, "master_port": self.port, "rank_offset": 1, "world_size": self.world_size}

    def join(self, *, warm_up: bool = True) -> None:
        self.open()
        self.say(pickled(self.unique_id))
        self.connect(warm_up=warm_up)

    def open(self) -> None:
        """Host the store: this waits until every worker has connected."""
        self.store = dist.TCPStore(
            HOST, self.port, self.world_size, True, PATIENCE, master_listen_fd=self._listener.detach(), use_libuv=False
        )

    def say(self, value: bytes) -> None:
        assert self.store is not None
        self.store.set(KEY, value)  # type: ignore[arg-type]  # accepts bytes too

    def connect(self, *, warm_up: bool = True) -> None:
        self.group = gloo_group(self._root, 0, self.world_size, HOST, PATIENCE)
        if warm_up:
            self.group.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert self.group is not None
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, PATIENCE
        self.group.broadcast([tensor], options).wait()

    def close(self) -> None:
        self._listener.close()
        self.group = self.store = None
