"""The rendezvous of a weight group's ranks: gloo's, or torch's over NCCL."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from ..deadline import Deadline
from .communicator import NcclLane, nccl_lane
from .interface import gloo_group
from .joining import Joining, check_arguments
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
_GRACE_S = 0.5  # time for a refusal to be read
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


class Rendezvous(Joining):
    """One rank's way into a process group of its own, over a store whose keys all ranks of torch.distributed know.

    Rank 0 is the sender and hosts the store at master_address:master_port. A `join` also fails when our ends disagree
    about the world size, or when one rank joins twice. secret: text that all ranks know and no other process, or None,
    as for foreign trainers; with it no other process reads the store's values or writes valid ones (over NCCL: but for
    NCCL's own). layout: how the keys of the two ends are nested (`LAYOUTS`); the default fits trainers that build
    theirs by SGLang's recipe. backend "nccl" needs `device`, and one GPU per rank: NCCL refuses two ranks on one GPU,
    so that a machine with a single GPU can only have a group of one rank. Under TORCH_DISTRIBUTED_DEBUG=DETAIL such
    trainers wrap their group in one that checks every operation; our group cannot communicate with it.
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
        check_arguments(rank, world_size, {
            f"master_port {master_port} is not a port": (master_port > 0 or rank == 0) and master_port < 65536,
            "group_name is empty": bool(group_name),
            "the secret is empty": secret != "",
            f"backend {backend!r} is not one of {', '.join(_DEVICE_OF)}": backend in _DEVICE_OF,
            f"layout {layout!r} is not one of {', '.join(LAYOUTS)}": layout in LAYOUTS,
            f"device {device} is not a CUDA device with an index, which nccl needs": backend != "nccl"
            or (device is not None and device.type == "cuda" and device.index is not None),
            "this build of torch has no NCCL": backend != "nccl" or dist.is_nccl_available(),
        })  # fmt: skip
        super().__init__(group_name, rank, world_size, (master_address, master_port), timeout_s)
        self._secret, self._backend, self._layout = secret, backend, layout
        self._device = torch.device("cpu") if backend == "gloo" or device is None else device
        self._proxy: _RendezvousStore | None = None
        self._refused: str | None = None  # why the rendezvous cannot succeed, when this rank has learned it

    def _why(self, error: BaseException) -> str:
        return self._refused or str(error)

    def _close(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None

    def _missing(self) -> str:
        proxy = self._proxy
        if proxy is not None:
            missing = proxy.missing_ranks(self._world_size)
        else:
            missing = [0] if self._rank else list(range(1, self._world_size))
        return ", ".join(map(str, missing)) or "none"

    def _meet(self) -> WeightGroup:
        host = self._store()
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

    def _group(self, lanes: tuple[dist.ProcessGroupGloo | NcclLane, ...], *stores: dist.Store) -> WeightGroup:
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

    def _make_nccl(self, store: dist.Store) -> NcclLane:
        if self._secret is not None:
            # Not sealed: this keeps groups apart, but a process that lists the keys can read NCCL's.
            store = dist.PrefixStore(hashlib.sha256(f"nccl/{self._secret}".encode()).hexdigest(), store)
        return nccl_lane(store, self._rank, self._world_size, self._device)
