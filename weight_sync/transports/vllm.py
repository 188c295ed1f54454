"""Transport of weights over vLLM's wire: broadcasts of rank 0, announced by vLLM's own calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..group.communicator import Communicators, NcclCommunicators
from ..group.joining import Joining
from ..group.vllm_protocol import BUFFER_BYTES, GROUP_NAME, send_tensors
from ..group.vllm_rendezvous import VllmRendezvous
from ..manifest import Manifest, NamedTensors, dtype_name
from ..target import Target
from .group_transport import GroupTransport, Place
from .transport import Sent, on_all


class VllmTransport(GroupTransport):
    """Send one broadcast of every tensor, or of packed buffers of them, to all targets, which speak vLLM's wire.

    The convention, which any sender can follow:

    1. The sender hosts a torch.distributed TCPStore and posts /init_weight_transfer_engine to every engine at the same
       time, with `init_info` {master_address, master_port, rank_offset, world_size, packed,
       packed_buffer_size_bytes}. The sender is rank 0; an engine has the ranks from its rank_offset on.
    2. All join a group. Where the engines' models are on GPUs, it is a NCCL communicator, joined as vLLM's own trainers
       and workers do: rank 0 sets the key `broadcast_from/0/0` of the store to the pickled ncclUniqueId, all call
       ncclCommInitRank, and all sum one float32 (`VllmRendezvous`). Where they are on CPUs, it is a gloo group named
       `vllm_weight_transfer`, joined by the steps of SGLang's `init_custom_process_group` (`Rendezvous` names the
       keys): vLLM has no such trainers.
    3. /start_weight_update; then /update_weights with `update_info` {names, dtype_names, shapes} to every engine at the
       same time, while rank 0 broadcasts: each tensor in its own dtype in the order of the lists, or packed: uint8
       buffers of the tensors' bytes back to back, each of which ends with the tensor that makes it longer than
       packed_buffer_size_bytes.
    4. /finish_weight_update with the version.

    Over NCCL these are the calls and broadcasts of vLLM's own trainer, so that a server of vLLM with a nccl weight
    transfer is a target of the transport too (a `WeightPusher` also compares digests and takes updates back, by verbs
    that vLLM lacks). The path over NCCL has not run on GPUs.
    """

    def __init__(
        self, *, packed_buffer_bytes: int | None = BUFFER_BYTES, host: str = "127.0.0.1",
        device: torch.device | None = None, communicators: Communicators | None = None,
    ) -> None:  # fmt: skip
        """Keep the settings; the group is made by the first push. packed_buffer_bytes: None sends each tensor by
        itself. host: the address of this machine under which the targets reach it. device: the GPU of this sender, for
        targets on GPUs, whose own is another one; None: gloo, for targets on CPUs. communicators: another library than
        NCCL. Raises ValueError for a size that is not positive, and for a device without NCCL."""
        if communicators is None and device is not None:
            communicators = NcclCommunicators(device)
        if communicators is None:
            super().__init__("gloo", host)
        else:
            super().__init__(communicators.backend, host, communicators.device)
        if packed_buffer_bytes is not None and packed_buffer_bytes < 1:
            raise ValueError(f"packed_buffer_bytes must be positive, not {packed_buffer_bytes}")
        self._buffer_bytes, self._communicators = packed_buffer_bytes, communicators

    def prepare(self, targets: Sequence[Target], timeout_s: float) -> None:
        """Join the targets in a group, unless they are in one: vLLM's order is init, then start. Raises as `send`."""
        self._joined(targets, timeout_s)

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """Broadcast the tensors in one /update_weights; see `Transport.send`."""
        group = self._joined(targets, timeout_s)
        info: dict[str, object] = {
            "names": [spec.name for spec in manifest.tensors],
            "dtype_names": [dtype_name(spec.dtype) for spec in manifest.tensors],
            "shapes": [list(spec.shape) for spec in manifest.tensors],
        }
        self._transfer(
            group, targets,
            lambda target: target.call("update_weights", timeout_s=timeout_s, update_info=info),
            lambda: send_tensors(group, manifest.tensors, tensors, self._buffer_bytes, timeout_s),
        )  # fmt: skip
        return Sent(manifest.num_bytes)

    def committed(self) -> None:
        """Do nothing: no state is kept."""

    def rejected(self) -> None:
        """Do nothing: no state is kept."""

    def _rendezvous(self, world_size: int, name: str, secret: str | None, timeout_s: float) -> Joining:
        if self._communicators is None:
            return super()._rendezvous(world_size, name, secret, timeout_s)
        return VllmRendezvous(
            self._communicators, 0, world_size, address=(self._host, 0), timeout_s=timeout_s, group_name=name
        )

    def _new_name(self) -> tuple[str, str | None]:
        return GROUP_NAME, None

    def _ask_to_join(self, target: Target, place: Place, timeout_s: float) -> object:
        info: dict[str, object] = {
            "master_address": self._host, "master_port": place.master_port, "rank_offset": place.rank_offset,
            "world_size": place.world_size, "packed": self._buffer_bytes is not None,
        }  # fmt: skip
        if self._buffer_bytes is not None:
            info["packed_buffer_size_bytes"] = self._buffer_bytes
        return target.call("init_weight_transfer_engine", timeout_s=timeout_s, init_info=info)

    def _ask_to_leave(self, name: str, targets: Sequence[Target]) -> None:
        on_all(targets, lambda target: target.call("shutdown_weight_transfer_engine", timeout_s=10.0))
