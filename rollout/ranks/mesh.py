"""The places of ranks: replicas of tp x pp ranks within the ranks of a torch.distributed job.

Within a replica tp varies fastest, so that the ranks of one stage, which communicate most, are neighbours:
local rank = pp_rank * tp + tp_rank, and world rank = dp_rank * (tp * pp) + local rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ...kernels.collectives.exchange import SharedMemory
from ..errors import RankFailure
from .stage_memory import open_stage_memory


@dataclass(frozen=True)
class Coords:
    """The place of a rank."""

    dp: int  # its replica
    pp: int  # its stage in the replica
    tp: int  # its place among the ranks of the stage


@dataclass(frozen=True)
class MeshPlan:
    """The division of a job's ranks. Example: `MeshPlan(world_size=8, tp=2, pp=2)` has two replicas."""

    world_size: int
    tp: int
    pp: int

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be a positive integer, not {value!r}"
            for name, value in (("world_size", self.world_size), ("tp", self.tp), ("pp", self.pp))
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if not wrong and self.world_size % (self.tp * self.pp):
            wrong.append(
                f"{self.world_size} ranks cannot be divided into replicas of tp={self.tp} x pp={self.pp} "
                f"= {self.tp * self.pp} ranks"
            )
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def num_ranks(self) -> int:
        """Number of ranks in one replica."""
        return self.tp * self.pp

    @property
    def dp(self) -> int:
        return self.world_size // self.num_ranks

    def coords(self, rank: int) -> Coords:
        dp, local = divmod(rank, self.num_ranks)
        return Coords(dp, *divmod(local, self.tp))

    def replica(self, rank: int) -> tuple[int, ...]:
        """Return the world ranks of the replica of `rank`, by local rank."""
        first = rank // self.num_ranks * self.num_ranks
        return tuple(range(first, first + self.num_ranks))

    def stage(self, rank: int) -> tuple[int, ...]:
        """Return the world ranks that hold the same layers of the same replica as `rank`, by tp rank."""
        first = rank // self.tp * self.tp
        return tuple(range(first, first + self.tp))


@dataclass(frozen=True)
class Mesh:
    """The plan, this rank and its process groups. A value that is passed on, never a global."""

    plan: MeshPlan
    rank: int  # of the world
    tp_group: dist.ProcessGroup | None  # ranks of this stage, for tensors; None when tp == 1
    replica_group: dist.ProcessGroup | None  # the replica, for control messages: gloo, on GPUs too; None for one rank
    stage_group: dist.ProcessGroup | None  # the replica, for hidden states between stages; None when pp == 1
    timeout_s: float  # of every operation on the groups
    tp_memory: SharedMemory | None = None  # of the ranks of this stage, for tensors, if they are on one host's CPUs

    @classmethod
    def single(cls) -> Mesh:
        """Return the mesh of one rank alone. It needs no torch.distributed."""
        return cls(MeshPlan(1, 1, 1), 0, None, None, None, 0.0)

    @classmethod
    def build(cls, tp: int, pp: int, *, backend: str | None = None, timeout_s: float = 60.0) -> Mesh:
        """Divide the default group: a collective that every rank of the job enters with the same arguments.

        backend: of the groups for tensors; None means nccl if there are GPUs, else gloo. Raises ValueError if no
        default group exists, if its ranks cannot be divided, or, on all ranks, if they have different arguments;
        RankFailure if not all of them come.
        """
        if not dist.is_initialized():
            raise ValueError(f"tp={tp} and pp={pp} need torch.distributed: launch with torchrun, or init_process_group")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s!r}")
        timeout = timedelta(seconds=timeout_s)
        _check_alike(tp, pp, timeout)  # first: ranks that make different groups wait for each other in vain
        plan, rank = MeshPlan(dist.get_world_size(), tp, pp), dist.get_rank()
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        tp_group = replica_group = stage_group = None
        # new_group is a collective of the whole world: every rank makes every group, in one order, its own or not.
        for first in range(0, plan.world_size, plan.num_ranks):
            ranks = plan.replica(first)
            is_mine = rank in ranks
            for stage in sorted({plan.stage(r) for r in ranks}) if tp > 1 else ():
                group = dist.new_group(list(stage), timeout=timeout, backend=backend)
                tp_group = group if rank in stage else tp_group
            if plan.num_ranks > 1:
                group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
                replica_group = group if is_mine else replica_group
            if pp > 1:
                group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
                stage_group = group if is_mine else stage_group
        memory = None
        if tp_group is not None and backend == "gloo":
            memory = open_stage_memory(tp_group, tp, plan.coords(rank).tp, timeout_s)
        return cls(plan, rank, tp_group, replica_group, stage_group, timeout_s, memory)

    def destroy(self) -> None:
        """Destroy the groups of `build`: no rank of the replica uses them any more. Their sockets and threads end with
        the last object that holds them. Waits for no other rank."""
        for group in (self.tp_group, self.replica_group, self.stage_group):
            if group is not None and dist.is_initialized():  # else they were destroyed with the default group
                dist.destroy_process_group(group)

    @property
    def coords(self) -> Coords:
        return self.plan.coords(self.rank)

    @property
    def tp(self) -> int:
        return self.plan.tp

    @property
    def pp(self) -> int:
        return self.plan.pp

    @property
    def dp(self) -> int:
        return self.plan.dp

    @property
    def tp_rank(self) -> int:
        return self.coords.tp

    @property
    def pp_rank(self) -> int:
        return self.coords.pp

    @property
    def dp_rank(self) -> int:
        return self.coords.dp

    @property
    def num_ranks(self) -> int:
        """Number of ranks in this replica."""
        return self.plan.num_ranks

    @property
    def local_rank(self) -> int:
        """The rank within the replica. It is the rank in `replica_group` and `stage_group` too."""
        return self.rank % self.num_ranks

    @property
    def is_controller(self) -> bool:
        return self.local_rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def is_sampling_rank(self) -> bool:
        return self.is_last_stage and self.tp_rank == 0


def _check_alike(tp: int, pp: int, timeout: timedelta) -> None:
    """Raise ValueError on every rank of the job, naming each rank's values, unless all have the same; RankFailure where
    not every rank has come in time. A collective."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mine = torch.tensor([tp, pp], dtype=torch.int64, device=device)
    given = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(given, mine, async_op=True)
    assert work is not None
    try:
        work.wait(timeout)
    except RuntimeError as error:
        what = f"not every rank of the job makes an engine of several ranks, as rank {dist.get_rank()} does"
        raise RankFailure(f"{what} with tp={tp} and pp={pp}: waited {timeout.total_seconds():g} s") from error
    shapes = [tuple(shape.tolist()) for shape in given]
    if len(set(shapes)) > 1:
        listed = "; ".join(f"rank {rank} has tp={tp} and pp={pp}" for rank, (tp, pp) in enumerate(shapes))
        raise ValueError(f"the ranks of a job share their models in one way: {listed}")
