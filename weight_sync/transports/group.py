"""Transport of weights over a process group: one broadcast for all targets."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ..errors import WeightSyncError
from ..group.protocol import send_update
from ..group.rendezvous import Rendezvous
from ..group.weight_group import Backend, WeightGroup
from ..layout.bucket import DEFAULT_BUCKET_BYTES
from ..manifest import Manifest, NamedTensors
from ..target import Target
from .transport import Sent, on_all, raise_failures


class DistributedTransport:
    """Send one broadcast to all targets, over a process group of its own with this process as rank 0."""

    def __init__(
        self, *, backend: Backend = "gloo", bucket_bytes: int = DEFAULT_BUCKET_BYTES, host: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Keep the settings; the group is made by the first push. host: the address of this machine under which the
        targets reach it; the group listens there and nowhere else."""
        self._backend, self._bucket_bytes, self._host, self._device = backend, bucket_bytes, host, device
        self._group: WeightGroup | None = None
        self._members: tuple[_Member, ...] = ()

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """Broadcast the tensors; see `Transport.send`."""
        self.send_as("lockstep", targets, manifest, tensors, timeout_s)
        return Sent(manifest.num_bytes)

    def send_as(
        self, load_format: str, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors,
        timeout_s: float, **options: object,
    ) -> None:  # fmt: skip
        """Broadcast tensors in our own protocol to receivers that read them as `load_format`."""
        group = self._joined(targets, timeout_s)

        def receive(target: Target) -> object:
            try:
                return target.call(
                    "update_weights_from_distributed", timeout_s=timeout_s, group_name=group.name,
                    load_format=load_format, manifest=manifest.to_json(), **options,
                )  # fmt: skip
            except BaseException:
                # Else the sender would wait for it until the deadline.
                group.abort(f"{target.name} failed")
                group.keys.close()
                raise

        with ThreadPoolExecutor(1, thread_name_prefix="receive") as pool:
            receiving = pool.submit(on_all, targets, receive)
            try:
                send_update(group, manifest, tensors, self._bucket_bytes, timeout_s)
            except WeightSyncError:
                self._leave(targets)
                raise_failures(receiving.result())  # the targets' errors are more precise
                raise
            except BaseException:
                self._leave(targets)
                raise
            failures = receiving.result()
        if failures:
            self._leave(targets)
            raise_failures(failures)

    def committed(self) -> None:
        """Do nothing: no state is kept."""

    def rejected(self) -> None:
        """Do nothing: no state is kept."""

    def close(self) -> None:
        """Leave the group. The targets leave it when they are asked to join another."""
        if self._group is not None:
            self._group.destroy()
            self._group = None

    def _joined(self, targets: Sequence[Target], timeout_s: float) -> WeightGroup:
        members = _members_of(targets, timeout_s, self._members if self._group is not None else ())
        if self._group is not None and self._members == members and self._group.broken is None:
            return self._group
        if self._group is not None:
            self._leave(targets)
        name, secret = f"lockstep-{uuid.uuid4().hex[:12]}", secrets.token_hex(32)
        offsets, size = {}, 1
        for member in members:
            offsets[member.target], size = size, size + member.num_ranks

        rendezvous = Rendezvous(self._host, 0, 0, size, name, self._backend, timeout_s, self._device, secret=secret)

        def join(target: Target) -> object:
            try:
                return target.call(
                    "init_weights_update_group", timeout_s=timeout_s, master_address=self._host,
                    master_port=rendezvous.port, rank_offset=offsets[target.name], world_size=size, group_name=name,
                    backend=self._backend, group_secret=secret,
                )  # fmt: skip
            except BaseException:
                rendezvous.cancel()  # the others need not wait for this one
                raise

        with ThreadPoolExecutor(1, thread_name_prefix="join") as pool:
            joining = pool.submit(on_all, targets, join)
            try:
                self._group = rendezvous.join()
            except WeightSyncError:
                _leave_group(name, targets)
                raise_failures(joining.result())
                raise
            failures = joining.result()
        if failures:
            self._leave(targets)
            raise_failures(failures)
        self._members = members
        return self._group

    def _leave(self, targets: Sequence[Target]) -> None:
        """Destroy the group at both ends."""
        if self._group is not None:
            name = self._group.name
            self.close()
            _leave_group(name, targets)


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


def _leave_group(name: str, targets: Sequence[Target]) -> None:
    """Make targets leave a group or stop waiting for it. Targets that are gone or have left already are ignored."""
    on_all(targets, lambda target: target.call("destroy_weights_update_group", timeout_s=10.0, group_name=name))
