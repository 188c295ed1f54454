"""A replica of verl's rollout: the actor of its server, placed beside the workers whose devices it uses."""

from __future__ import annotations

import asyncio
import os

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutReplica

from .server import LockstepServer
from .settings import refuse_settings


def server_name(replica_rank: int, suffix: str = "") -> str:
    """Name of a replica's actor in Ray."""
    return f"lockstep_server_{replica_rank}{suffix}"


class LockstepReplica(RolloutReplica):
    """One replica on one node: a server of `tensor_model_parallel_size` times `pipeline_model_parallel_size` ranks."""

    async def launch_servers(self) -> None:
        """Start the server. Raises NotImplementedError for replicas over several nodes, and for settings that Lockstep
        does not have."""
        refuse_settings(self.config)
        if self.nnodes > 1:
            raise NotImplementedError(f"a replica of lockstep is on one node, not on {self.nnodes}: divide it by fewer")
        if len(self.workers) != self.world_size:
            raise ValueError(f"{len(self.workers)} workers for a replica of {self.world_size} ranks")
        variable = get_platform().visible_devices_envvar()
        places = await asyncio.gather(
            *[
                worker.__ray_call__.remote(
                    lambda _: (ray.get_runtime_context().get_node_id(), os.environ.get(variable, ""))
                )
                for worker in self.workers
            ]
        )
        devices = sorted({device for _, listed in places for device in listed.split(",") if device}, key=int)
        environment = {variable: ",".join(devices)} if devices else {}
        role = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        server = (
            ray.remote(LockstepServer)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=places[0][0], soft=False),
                runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
                name=server_name(self.replica_rank, role + self.name_suffix),
                max_concurrency=self.max_concurrency,
            )
            .remote(
                self.config, omega_conf_to_dataclass(self.model_config, HFModelConfig), self.rollout_mode, environment
            )
        )
        self._server_address = await server.launch.remote()
        self._server_handle = server
        self.servers = [server]
