"""The rendezvous of a weight group's ranks, with a deadline and a way to cancel it.

Connecting to a store blocks as long as the process that hosts it is stopped, so it runs
in a thread of its own too (see `shared_keys`).
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from ..deadline import Deadline
from ..errors import TransferFailed
from .interface import gloo_group, host_store, listen_at
from .sealed_store import Keys, sealed
from .shared_keys import SharedKeys, Stop
from .weight_group import Backend, Lane, WeightGroup

# The prefixes between the TCPStore and the backend, outermost first. "torch" is the chain of frameworks that follow
# SGLang's init_custom_process_group recipe (slime, Miles, OpenRLHF, verl): the recipe puts the group's name in front,
# torch's _new_process_group_helper puts it there again with a slash, then the device of the first backend.
# rendezvous("tcp://") adds none. Read in torch 2.13; every older copy that was checked has the same chain. "plain" is
# for PrefixStore(name, store) passed to a backend's constructor.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "torch": ("{group}", "{group}/", "{device}/"),
    "plain": ("{group}",),
}
_DEVICE_OF = {"gloo": "cpu", "nccl": "cuda"}
_CONNECT_S = 1.0  # for one attempt to reach the host
_GRACE_S = 0.5  # time for a cancelled rendezvous to report its end, and for a refusal to be read
_POLL_S = 0.005  # between two checks of which ranks have read the refusal


class _RendezvousStore(dist.Store):
    """The store as gloo uses it while its ranks find each other: a wait here can be cancelled."""

    def __init__(self, store: Keys, rank: int, stop: Stop, deadline: Deadline) -> None:
        super().__init__()
        self._store, self._rank, self._stop, self._deadline = store, rank, stop, deadline
        self._keys = SharedKeys(store)
        self._addresses: str | None = None  # gloo's addresses have the keys <this><rank>
        self._arrived: set[str] = set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo passes bytes, not str
        if self._addresses is None and key.endswith(str(self._rank)):
            self._addresses = key.removesuffix(str(self._rank))
        self._store.set(key, value)  # type: ignore[arg-type]  # accepts bytes too

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._keys.wait(keys, self._deadline, self._stop)
        self._arrived.update(keys)

    def missing_ranks(self, world_size: int) -> list[int]:
        """Return the ranks that have not published their address to gloo."""
        others = [rank for rank in range(world_size) if rank != self._rank]
        if self._addresses is None:
            return others
        keys, soon = {rank: f"{self._addresses}{rank}" for rank in others}, self._deadline.at_most(_GRACE_S)
        try:
            return [rank for rank, key in keys.items() if not self._keys.has(key, soon)]
        except RuntimeError:  # the store is gone or silent: use the last known ranks
            return [rank for rank, key in keys.items() if key not in self._arrived]

    def close(self) -> None:
        self._keys.close()


class Rendezvous:
    """One rank's way into a process group of its own. `join` blocks: call it in a thread without other work; `cancel`
    ends it. `GroupRegistry` keeps groups by name.

    Rank 0 is the sender and hosts the store at master_address:master_port, an address of its machine and no other one;
    the others wait for it. secret: text that all ranks know and no other process, or None, as for foreign trainers;
    with it no other process reads the store's values or writes valid ones (over NCCL: but for NCCL's own). layout: how
    the keys of the two ends are nested (`LAYOUTS`); the default fits trainers that build theirs by SGLang's recipe.
    backend "nccl" needs `device`, and one GPU per rank: NCCL refuses two ranks on one GPU, so that a machine with a
    single GPU can only have a group of one rank. Under TORCH_DISTRIBUTED_DEBUG=DETAIL such trainers wrap their group in
    one that checks every operation; our group cannot communicate with it.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: Backend = "gloo",
        timeout_s: float = 300.0,
        device: torch.device | None = None,
        layout: str = "torch",
        secret: str | None = None,
    ) -> None:
        """Check the arguments and open rank 0's port, which port 0 leaves to the system.

        Raises ValueError listing every bad argument, TransferFailed where rank 0 cannot listen at its address.
        """
        wrong = [
            text
            for text, holds in {
                f"world_size {world_size} is not positive": world_size >= 1,
                f"rank {rank} is not in a group of {world_size}": 0 <= rank < world_size,
                f"master_port {master_port} is not a port": (master_port > 0 or rank == 0) and master_port < 65536,
                "group_name is empty": bool(group_name),
                "the secret is empty": secret != "",
                f"backend {backend!r} is not one of {', '.join(_DEVICE_OF)}": backend in _DEVICE_OF,
                f"layout {layout!r} is not one of {', '.join(LAYOUTS)}": layout in LAYOUTS,
                f"device {device} is not a CUDA device with an index, which nccl needs": backend != "nccl"
                or (device is not None and device.type == "cuda" and device.index is not None),
                "this build of torch has no NCCL": backend != "nccl" or dist.is_nccl_available(),
            }.items()
            if not holds
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        self._address = (master_address, master_port)
        self.group_name, self._secret = group_name, secret
        self._rank, self._world_size, self._backend = rank, world_size, backend
        self._device = torch.device("cpu") if backend == "gloo" or device is None else device
        self._layout = layout
        self._deadline = Deadline.after(timeout_s)
        self._cancelled = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._left = False  # the caller has left: a group that is complete later is destroyed again
        self._result: WeightGroup | BaseException | None = None
        self._proxy: _RendezvousStore | None = None
        self._refused: str | None = None  # why the rendezvous cannot succeed, when this rank has learned it
        self._own_address = ""  # of this machine, as the other ranks reach it
        self._listener = self._listen() if rank == 0 else None

    @property
    def port(self) -> int:
        """The port of the store."""
        return self._address[1]

    def cancel(self) -> None:
        """End a `join` that waits or has not begun, from any thread; it raises TransferFailed. Does nothing after the
        join."""
        self._cancelled.set()
        with self._lock:
            if self._listener is not None:
                self._listener.close()
        self._wake.set()

    def join(self) -> WeightGroup:
        """Return the group when all ranks are there. Raises TransferFailed naming rank, group, phase and the ranks that
        had not arrived: at the deadline, when our ends disagree about the world size, or when one rank joins twice."""
        threading.Thread(target=self._run, name=f"rendezvous-{self.group_name}", daemon=True).start()
        self._wake.wait(self._deadline.left_s)
        if self._result is None:
            # Cancelled or too late. The thread reports which ranks are missing, unless torch blocks it.
            self._wake.clear()
            if self._result is None:
                self._wake.wait(_GRACE_S)
        with self._lock:
            self._left = True
            result = self._result
        if isinstance(result, WeightGroup):
            return result
        if isinstance(result, TransferFailed):
            raise result
        raise self._failure("the process that hosts the store does not answer") from result

    def _run(self) -> None:
        group: WeightGroup | None = None
        try:
            group = self._meet()
            result: WeightGroup | BaseException = group
        except (RuntimeError, OSError, ValueError) as error:  # of torch, the socket or ours; the caller raises it
            # A new exception: a traceback would keep the store alive, and its port taken, as long as the error exists.
            failed = error if isinstance(error, TransferFailed) else self._failure(self._refused or str(error))
            result = TransferFailed(str(failed))
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None
        with self._lock:
            self._result = result
            abandoned = self._left
        self._wake.set()
        if abandoned and group is not None:
            group.destroy()

    def _failure(self, why: str) -> TransferFailed:
        where = f"rank {self._rank} of group {self.group_name!r}, rendezvous at {self._address[0]}:{self._address[1]}"
        proxy = self._proxy
        if proxy is not None:
            missing = proxy.missing_ranks(self._world_size)
        else:
            missing = [0] if self._rank else list(range(1, self._world_size))
        if self._cancelled.is_set():
            why = f"cancelled ({why})"
        elif self._deadline.has_passed:
            why = f"deadline of {self._deadline.timeout_s:g} s passed ({why})"
        return TransferFailed(f"{where}: {why}; ranks that had not arrived: {', '.join(map(str, missing)) or 'none'}")

    def _meet(self) -> WeightGroup:
        host = self._connect()
        roster = SharedKeys(self._sealed(dist.PrefixStore(f"lockstep/{self.group_name}", host), "roster"))
        try:
            self._sign(roster)
            chain: dist.Store = host
            for prefix in LAYOUTS[self._layout]:
                chain = dist.PrefixStore(prefix.format(group=self.group_name, device=_DEVICE_OF[self._backend]), chain)
            if self._backend == "nccl":
                return self._group((self._make_nccl(chain),), host, chain)
            proxy, first = self._make_gloo(self._sealed(chain, "first"), roster)
            if not self._all_are_ours(roster):
                return self._group((first,), host, chain, proxy)
            proxy.close()
            chain = dist.PrefixStore(f"lockstep/{self.group_name}/second", host)
            again, second = self._make_gloo(self._sealed(chain, "second"), roster)
            return self._group((first, second), host, chain, proxy, again)
        finally:
            if self._rank == 0 and self._refused is not None:
                self._let_all_hear(roster)
            roster.close()

    def _group(
        self, lanes: tuple[dist.ProcessGroupGloo | dist.ProcessGroupNCCL, ...], *stores: dist.Store
    ) -> WeightGroup:
        both = cast("tuple[Lane, ...]", lanes)
        return WeightGroup(
            self.group_name, self._rank, self._world_size, self._backend, self._device, both, stores, self._secret
        )

    def _sealed(self, store: dist.Store, scope: str) -> Keys:
        return sealed(store, self._secret, scope)

    def _make_gloo(self, keys: Keys, roster: SharedKeys) -> tuple[_RendezvousStore, dist.ProcessGroupGloo]:
        """Let gloo's ranks find each other; returns the store, which the group needs, and the group."""
        proxy = self._proxy = _RendezvousStore(keys, self._rank, lambda: self._refusal(roster), self._deadline)
        return proxy, gloo_group(proxy, self._rank, self._world_size, self._own_address, self._deadline.left)

    def _all_are_ours(self, roster: SharedKeys) -> bool:
        """Return whether every rank uses this class, when all are there. Rank 0 decides."""
        if self._world_size == 1:
            return False
        if self._rank == 0:
            signed = roster.has([f"joined/{rank}" for rank in range(self._world_size)], self._deadline)
            roster.put("all_ours", "yes" if signed else "no", self._deadline)
            return signed
        if not roster.has("world_size", self._deadline):  # rank 0 is foreign and publishes nothing
            return False
        return roster.get("all_ours", self._deadline, lambda: self._refusal(roster)) == "yes"

    def _listen(self) -> socket.socket:
        """Open the port of the store, before any other rank is told of it."""
        try:
            listener = listen_at(*self._address)
        except OSError as error:
            raise TransferFailed(f"rank 0 of group {self.group_name!r}, rendezvous: {error}") from error
        self._own_address, port = listener.getsockname()[:2]
        self._address = (self._address[0], port)
        return listener

    def _connect(self) -> dist.TCPStore:
        address, port = self._address
        if self._rank == 0:
            with self._lock:
                listener, self._listener = self._listener, None
            if listener is None or listener.fileno() < 0:
                raise self._failure("its port is closed")
            return host_store(listener, address, self._world_size, self._deadline.left)
        failure = "not tried"
        while not self._stopped() and not self._deadline.has_passed:
            soon = self._deadline.at_most(_CONNECT_S)
            try:
                # A plain socket first: a TCPStore would keep trying and ignore `cancel`. When it is connected, the
                # TCPStore counts this rank in at a host that waits for all of them (wait_for_workers, which only hosts
                # wait for).
                with socket.create_connection(self._address, timeout=max(0.05, soon.left_s)) as connection:
                    if connection.getsockname() == connection.getpeername():
                        # The system gave this socket the very port that it looks for, and TCP connects it to itself.
                        # Reset, for after a plain close the host could not listen there for a minute.
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        raise ConnectionRefusedError(f"nobody listens at {address}:{port}")
                    self._own_address = connection.getsockname()[0]
                return dist.TCPStore(address, port, self._world_size, False, timeout=soon.left)
            except (OSError, RuntimeError) as error:
                failure = str(error)
                self._cancelled.wait(min(0.05, self._deadline.left_s))
        raise self._failure(f"rank 0 cannot be reached: {failure}")

    def _sign(self, roster: SharedKeys) -> None:
        """Publish this rank to our other ends, where there are any; see `_refusal`."""
        if self._rank == 0:
            roster.put("world_size", str(self._world_size), self._deadline)
        if roster.add(f"joined/{self._rank}", 1, self._deadline) > 1:
            roster.put("refused", f"rank {self._rank} joined twice", self._deadline)
        refused = self._refusal(roster)
        if refused:
            raise self._failure(refused)

    def _refusal(self, roster: SharedKeys) -> str | None:
        """Return why this rendezvous cannot succeed, as soon as any rank of ours knows. A foreign rank 0 publishes
        nothing."""
        if stopped := self._stopped():
            return stopped
        if self._refused is None:
            self._refused = self._read_refusal(roster)
            if self._refused is not None and self._rank:
                roster.add(f"heard/{self._rank}", 1, self._deadline)
        return self._refused

    def _read_refusal(self, roster: SharedKeys) -> str | None:
        if self._rank and roster.has("world_size", self._deadline):
            size = int(roster.get("world_size", self._deadline))
            if size != self._world_size and not roster.has("refused", self._deadline):
                differ = f"rank {self._rank} joins a group of {self._world_size}, rank 0 one of {size}"
                roster.put("refused", differ, self._deadline)
                return differ
        return roster.get("refused", self._deadline) if roster.has("refused", self._deadline) else None

    def _let_all_hear(self, roster: SharedKeys) -> None:
        """Wait a moment until all signed ranks have read the refusal: the store ends with its host."""
        soon = self._deadline.at_most(_GRACE_S)

        def is_unheard(rank: int) -> bool:
            if not roster.has(f"joined/{rank}", soon):
                return False
            return roster.add(f"heard/{rank}", 0, soon) < roster.add(f"joined/{rank}", 0, soon)

        while any(map(is_unheard, range(1, self._world_size))) and not soon.has_passed:
            if self._cancelled.wait(min(_POLL_S, soon.left_s)):
                return

    def _stopped(self) -> str | None:
        return "cancelled" if self._cancelled.is_set() else None

    def _make_nccl(self, store: dist.Store) -> dist.ProcessGroupNCCL:
        if self._secret is not None:
            # Not sealed: this keeps groups apart, but a process that lists the keys can read NCCL's.
            store = dist.PrefixStore(hashlib.sha256(f"nccl/{self._secret}".encode()).hexdigest(), store)
        # NCCL's threads keep using the store, so they get torch's own. The connection is made now and not at the first
        # broadcast, so that a rank that never joins makes the rendezvous fail.
        torch.cuda.set_device(self._device)
        made = dist.ProcessGroupNCCL(store, self._rank, self._world_size, dist.ProcessGroupNCCL.Options())
        made.eager_connect_single_device(self._device)
        return made
