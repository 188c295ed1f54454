"""The common part of transports over a process group: join the targets, run a transfer beside their calls, leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ..errors import WeightSyncError
from ..group.joining import Joining
from ..group.rendezvous import Rendezvous
from ..group.weight_group import Backend, WeightGroup
from ..target import Target
from .transport import on_all, raise_failures


class GroupTransport(ABC):
    """A group with this process as rank 0 and every rank of every target. A subclass knows the targets' verbs."""

    takes_pieces = True

    def __init__(self, backend: Backend, host: str, device: torch.device | None = None) -> None:
        self._backend, self._host, self._device = backend, host, device
        self._group: WeightGroup | None = None
        self._members: tuple[_Member, ...] = ()
        self._targets: tuple[Target, ...] = ()  # of the group

    def _transfer(
        self,
        group: WeightGroup,
        targets: Sequence[Target],
        call: Callable[[Target], object],
        send: Callable[[], None],
    ) -> None:
        """Let all targets receive while this process sends. Raises the targets' errors, which are more precise, else
        the sender's; the group is left after both."""

        def receive(target: Target) -> object:
            try:
                return call(target)
            except BaseException:
                # Else the sender would wait for it until the deadline.
                group.abort(f"{target.name} failed")
                group.keys.close()
                raise

        with ThreadPoolExecutor(1, thread_name_prefix="receive") as pool:
            receiving = pool.submit(on_all, targets, receive)
            try:
                send()
            except WeightSyncError:
                self._leave(targets)
                raise_failures(receiving.result())
                raise
            except BaseException:
                self._leave(targets)
                raise
            failures = receiving.result()
        if failures:
            self._leave(targets)
            raise_failures(failures)

    def close(self) -> None:
        """Leave the group, and ask the targets to: their ends have threads and descriptors of their own."""
        self._leave(self._targets)

    def _joined(self, targets: Sequence[Target], timeout_s: float) -> WeightGroup:
        members = _members_of(targets, timeout_s, self._members if self._group is not None else ())
        if self._group is not None and self._members == members and self._group.broken is None:
            return self._group
        if self._group is not None:
            self._leave(targets)
        name, secret = self._new_name()
        offsets, size = {}, 1
        for member in members:
            offsets[member.target], size = size, size + member.num_ranks

        rendezvous = self._rendezvous(size, name, secret, timeout_s)

        def join(target: Target) -> object:
            try:
                place = Place(rendezvous.port, offsets[target.name], size, name, secret)
                return self._ask_to_join(target, place, timeout_s)
            except BaseException:
                rendezvous.cancel()  # the others need not wait for this one
                raise

        with ThreadPoolExecutor(1, thread_name_prefix="join") as pool:
            joining = pool.submit(on_all, targets, join)
            try:
                self._group = rendezvous.join()
            except WeightSyncError:
                self._ask_to_leave(name, targets)
                raise_failures(joining.result())
                raise
            failures = joining.result()
        if failures:
            self._leave(targets)
            raise_failures(failures)
        self._members, self._targets = members, tuple(targets)
        return self._group

    def _leave(self, targets: Sequence[Target]) -> None:
        """Destroy the group at both ends."""
        if self._group is not None:
            name, group = self._group.name, self._group
            self._group = None
            group.destroy()
            self._ask_to_leave(name, targets)

    def _rendezvous(self, world_size: int, name: str, secret: str | None, timeout_s: float) -> Joining:
        """Return rank 0's way into a new group, with its port open."""
        return Rendezvous(self._host, 0, 0, world_size, name, self._backend, timeout_s, self._device, secret=secret)

    @abstractmethod
    def _new_name(self) -> tuple[str, str | None]:
        """Return a new group's name, and its secret, or None where the targets know of none."""

    @abstractmethod
    def _ask_to_join(self, target: Target, place: Place, timeout_s: float) -> object:
        """Make a target join the group."""

    @abstractmethod
    def _ask_to_leave(self, name: str, targets: Sequence[Target]) -> None:
        """Make targets leave a group or stop waiting for it. Targets that are gone or have left already are ignored."""


@dataclass(frozen=True)
class Place:
    """A target's place in a group that is being made."""

    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    secret: str | None


@dataclass(frozen=True)
class _Member:
    """A target's share of a group."""

    target: str
    num_ranks: int = 1
    engines: str = ""  # behind a router: the description of its engines, so that a change is noticed


def _members_of(targets: Sequence[Target], timeout_s: float, known: Sequence[_Member]) -> tuple[_Member, ...]:
    """Return how many ranks each target needs: the ranks of its model, or for a router those of all its workers. Raises
    as `raise_failures`.

    known: the members of the last update. An engine's number of ranks stays the same; a router's workers come and go.
    """
    found = {member.target: member for member in known if not member.engines}

    def ask(target: Target) -> None:
        state = target.call("state", timeout_s=timeout_s)
        engines = state.get("members")
        found[target.name] = _Member(target.name, int(state.get("num_ranks", 1)))  # type: ignore[call-overload]
        if isinstance(engines, list):
            found[target.name] = _Member(target.name, sum(one["num_ranks"] for one in engines), repr(engines))

    raise_failures(on_all([target for target in targets if target.name not in found], ask))
    return tuple(found[target.name] for target in targets)
