"""The trainer's end of a weight update for verl: each worker gathers, one of each replica sends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import httpx
import ray
from torch import Tensor
from verl.utils.device import get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout

from ...weight_sync.transports.same_host import TensorTransport
from ..push.http_target import HttpTarget
from ..push.pusher import WeightPusher
from .outgoing import Outgoing
from .replica import server_name
from .settings import num_ranks

_TIMEOUT_S = 600.0  # of each wait in an update


class WeightSender(BaseRollout):
    """A worker's part of its replica. The first worker of each replica has the connection to its server.

    An update is one transaction, checked by SHA-256: the replica has all new weights, or all old ones and the trainer
    an error that names the reason. Its version is verl's `global_steps`.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank, ranks = int(os.environ["RANK"]), num_ranks(self.config)
        self.replica_rank = rank // ranks if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % ranks == 0
        self._url = self._key = ""
        self._num_updates = 0
        self._outgoing = Outgoing.of(self.model_config.hf_config, PrecisionType.to_dtype(self.config.dtype))

    async def resume(self, tags: Sequence[str]) -> None:
        """Allocate the server's memory again. tags: "weights", "kv_cache"."""
        await self._memory("resume", tags)

    async def release(self) -> None:
        """Release the memory of the server's weights and KV."""
        await self._memory("release", ("kv_cache", "weights"))

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **options: Any,
    ) -> None:
        """Send the weights. Every worker reads them to the end, since gathering them is a collective. Raises
        PushFailed; the server has its old weights then."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"wire_format={wire_format!r}: the rollout lockstep takes named_tensors")
        if options.get("peft_config") and options.get("base_sync_done"):
            raise NotImplementedError(
                "the rollout lockstep takes no adapters: set actor_rollout_ref.model.lora.merge=True"
            )
        version = str(self._num_updates if global_steps is None else global_steps)
        self._num_updates += 1
        tensors = self._outgoing.tensors(weights)
        try:
            if self.is_leader_rank:
                url, key = await self._endpoint()
                self._push(url, key, tensors, version)  # in this thread, whose device is the weights'
        finally:
            for _ in tensors:
                pass

    def _push(self, url: str, key: str, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        bucket = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        transport = TensorTransport(bucket_bytes=bucket, cuda=get_device_name() == "cuda")
        target = HttpTarget(url, key, name=f"replica {self.replica_rank}")
        pusher = WeightPusher([target], transport, timeout_s=_TIMEOUT_S)
        try:
            pusher.push_tensors(tensors, None, version)
        finally:
            pusher.close()
            target.close()

    async def _memory(self, what: str, tags: Sequence[str]) -> None:
        if not (self.is_leader_rank and self.config.free_cache_engine):
            return
        url, key = await self._endpoint()
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
            headers = {"Authorization": f"Bearer {key}"}
            path = f"{url}/{what}_memory_occupation"
            response = await client.post(path, json={"tags": list(tags)}, headers=headers)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.status_code} {response.text[:500]}")

    async def _endpoint(self) -> tuple[str, str]:
        if not self._url:
            self._url, self._key = await ray.get_actor(server_name(self.replica_rank)).endpoint.remote()
        return self._url, self._key
