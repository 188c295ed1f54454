"""The weight verb that joins the NCCL communicator of vLLM's trainers."""

from __future__ import annotations

from ...rollout.engine import Engine
from ...weight_sync.group.communicator import Communicators, NcclCommunicators, unique_id_of
from ...weight_sync.group.joining import check_places
from ...weight_sync.group.registry import GroupRegistry
from ...weight_sync.group.vllm_protocol import GROUP_NAME
from ...weight_sync.group.vllm_rendezvous import VllmRendezvous
from ..service_config import ServiceConfig
from .all_ranks import Replica, on_all_ranks


class VllmGroupVerbs:
    """The methods of a service for trainers of vLLM. The subclass sets the fields."""

    engine: Engine
    config: ServiceConfig
    groups: GroupRegistry
    replica: Replica

    @property
    def communicators(self) -> Communicators | None:
        """The library that joins trainers of vLLM: NCCL, where the model is on a GPU. None: they cannot be joined."""
        device = self.engine.model.device
        if self.groups.communicators is not None or device.type != "cuda":
            return self.groups.communicators
        return NcclCommunicators(device)

    @on_all_ranks
    def join_vllm_trainer(
        self,
        rank_offset: int,
        world_size: int,
        *,
        master_address: str | None = None,
        master_port: int | None = None,
        nccl_unique_id_b64: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Join a trainer's communicator as rank `rank_offset`, as the group `GROUP_NAME`; rank 0 is the trainer.

        Its NCCL id comes from the store at master_address:master_port, or is given (`VllmRendezvous`). Blocks until all
        have joined, while the engine keeps running. Where several ranks hold the model each joins, as `rank_offset`
        plus its local rank, and the engine runs no step meanwhile. Raises ValueError for a group that exists, for a
        model on a CPU, and for a store where pickles are turned off, TransferFailed when not all ranks came in time.
        """
        communicators = self.communicators
        if communicators is None:
            raise ValueError("vLLM's trainers use NCCL, which needs a model on a GPU: this one is on the CPU")
        check_places(rank_offset, self.replica.peers.num_ranks, world_size)
        if master_address is not None and not self.config.allow_pickle:
            raise ValueError(
                "the trainer's store has its NCCL id as a pickle, and pickles are turned off (allow_pickle=False): "
                "pass nccl_unique_id_b64"
            )
        rendezvous = VllmRendezvous(
            communicators,
            rank_offset + self.replica.local_rank,
            world_size,
            address=None if master_address is None else (master_address, int(master_port or 0)),
            unique_id=None if nccl_unique_id_b64 is None else unique_id_of(nccl_unique_id_b64),
            timeout_s=self.config.wait_s(timeout_s),
        )
        self.replica.peers.together(
            "join_vllm_trainer",
            lambda: self.groups.init(rendezvous),
            lambda: self.groups.destroy(GROUP_NAME),
        )
