"""Transport of weights over a process group in our own protocol: one broadcast for all targets."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence

import torch

from ..group.protocol import send_update
from ..group.weight_group import Backend
from ..layout.bucket import DEFAULT_BUCKET_BYTES
from ..manifest import Manifest, NamedTensors
from ..target import Target
from .group_transport import GroupTransport, Place
from .transport import Sent, on_all


class DistributedTransport(GroupTransport):
    """Send one broadcast to all targets, over a process group of its own with this process as rank 0."""

    def __init__(
        self, *, backend: Backend = "gloo", bucket_bytes: int = DEFAULT_BUCKET_BYTES, host: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Keep the settings; the group is made by the first push. host: the address of this machine under which the
        targets reach it; the group listens there and nowhere else."""
        super().__init__(backend, host, device)
        self._bucket_bytes = bucket_bytes

    def prepare(self, targets: Sequence[Target], timeout_s: float) -> None:
        """Do nothing: the group is joined with the first tensors."""

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
        arguments = {"group_name": group.name, "load_format": load_format, "manifest": manifest.to_json(), **options}
        self._transfer(
            group, targets,
            lambda target: target.call("update_weights_from_distributed", timeout_s=timeout_s, **arguments),
            lambda: send_update(group, manifest, tensors, self._bucket_bytes, timeout_s),
        )  # fmt: skip

    def committed(self) -> None:
        """Do nothing: no state is kept."""

    def rejected(self) -> None:
        """Do nothing: no state is kept."""

    def _new_name(self) -> tuple[str, str | None]:
        return f"lockstep-{uuid.uuid4().hex[:12]}", secrets.token_hex(32)

    def _ask_to_join(self, target: Target, place: Place, timeout_s: float) -> object:
        return target.call(
            "init_weights_update_group", timeout_s=timeout_s, master_address=self._host,
            master_port=place.master_port, rank_offset=place.rank_offset, world_size=place.world_size,
            group_name=place.group_name, backend=self._backend, group_secret=place.secret,
        )  # fmt: skip

    def _ask_to_leave(self, name: str, targets: Sequence[Target]) -> None:
        on_all(targets, lambda target: target.call("destroy_weights_update_group", timeout_s=10.0, group_name=name))
