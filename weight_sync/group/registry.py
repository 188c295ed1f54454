"""Joining weight groups, and the groups of one process by name."""

from __future__ import annotations

import threading

import torch

from ..errors import TransferFailed
from .rendezvous import Rendezvous
from .weight_group import Backend, WeightGroup


def join_group(
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
) -> WeightGroup:
    """Join a process group of its own and return it when all `world_size` ranks are there. Blocks: call it in a thread
    without other work. `Rendezvous` does the same with a `cancel`; `GroupRegistry` keeps groups by name.

    Rank 0 is the sender and hosts the store at master_address:master_port, an address of its machine and no other one;
    the others wait for it. secret: text that all ranks know and no other process, or None, as for foreign trainers;
    with it no other process reads the store's values or writes valid ones (over NCCL: but for NCCL's own). layout: how
    the keys of the two ends are nested (`LAYOUTS`); the default fits trainers that build theirs by SGLang's recipe.
    backend "nccl" needs `device`, and one GPU per rank: NCCL refuses two ranks on one GPU, so that a machine with a
    single GPU can only have a group of one rank. Under TORCH_DISTRIBUTED_DEBUG=DETAIL such trainers wrap their group in
    one that checks every operation; our group cannot communicate with it.

    Raises ValueError listing every bad argument, and TransferFailed naming rank, group, phase and the ranks that had
    not arrived: at the deadline, when our ends disagree about the world size, or when one rank joins twice.
    """
    return Rendezvous(
        master_address, master_port, rank, world_size, group_name, backend, timeout_s, device, layout, secret
    ).join()


class GroupRegistry:
    """The groups of one process by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, WeightGroup | Rendezvous] = {}

    def init(self, rendezvous: Rendezvous) -> WeightGroup:
        """Join the rendezvous and keep the group under its name. Raises ValueError for a name that is taken or is
        joining."""
        group_name = rendezvous.group_name
        with self._lock:
            if group_name in self._groups:
                rendezvous.cancel()
                raise ValueError(f"a group named {group_name!r} exists already; destroy it first")
            self._groups[group_name] = rendezvous
        group: WeightGroup | None = None
        try:
            group = rendezvous.join()
        finally:
            with self._lock:
                wanted = self._groups.get(group_name) is rendezvous
                if wanted and group is not None:
                    self._groups[group_name] = group
                elif wanted:
                    del self._groups[group_name]
        if not wanted:  # destroyed at the moment when it was complete
            group.destroy()
            raise TransferFailed(f"{group.at('rendezvous')}: destroyed while it was joining")
        return group

    def get(self, group_name: str) -> WeightGroup:
        """Return a group. Raises ValueError for a name that is unknown or still joining."""
        with self._lock:
            group = self._groups.get(group_name)
            names = sorted(name for name, value in self._groups.items() if isinstance(value, WeightGroup))
        if not isinstance(group, WeightGroup):
            state = "is still joining" if group is not None else "does not exist"
            raise ValueError(f"group {group_name!r} {state}; groups: {', '.join(names) or 'none'}")
        return group

    def state(self) -> dict[str, str]:
        """Return, by name, "joining", "ready", or the reason why a group is broken. Waits at most for a lookup of
        another thread."""
        with self._lock:
            groups = dict(self._groups)
        return {
            name: (group.broken or "ready") if isinstance(group, WeightGroup) else "joining"
            for name, group in groups.items()
        }

    def destroy(self, group_name: str) -> None:
        """Destroy a group, or cancel its rendezvous. Raises ValueError for an unknown name."""
        with self._lock:
            group = self._groups.pop(group_name, None)
        if group is None:
            raise ValueError("The group to be destroyed does not exist.")
        if isinstance(group, WeightGroup):
            group.destroy()
        else:
            group.cancel()

    def close(self) -> None:
        """Destroy all groups."""
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            if isinstance(group, WeightGroup):
                group.destroy()
            else:
                group.cancel()
