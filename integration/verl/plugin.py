"""Registration of the rollout "lockstep" at verl.

verl imports this module itself (entry point group `verl.plugins`) in each of its processes.
"""

from __future__ import annotations

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

NAME = "lockstep"  # actor_rollout_ref.rollout.name


def _replica_class() -> type[RolloutReplica]:
    from .replica import LockstepReplica

    return LockstepReplica


RolloutReplicaRegistry.register(NAME, _replica_class)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__package__}.sender.WeightSender"
