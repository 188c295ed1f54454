"""Tests of the places of ranks in a mesh, and of the members of its groups."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.errors import RankFailure
from lockstep.rollout.ranks.mesh import Coords, Mesh, MeshPlan
from lockstep.tests.support.forked_ranks import run_survivors


def test_tp_varies_fastest_within_a_replica():
    plan = MeshPlan(world_size=8, tp=2, pp=2)
    assert plan.dp == 2 and plan.num_ranks == 4
    coords = [Coords(0, 0, 0), Coords(0, 0, 1), Coords(0, 1, 0), Coords(0, 1, 1), Coords(1, 0, 0)]
    assert [plan.coords(rank) for rank in range(5)] == coords
    assert len({plan.coords(rank) for rank in range(8)}) == 8
    assert plan.replica(5) == (4, 5, 6, 7) and plan.stage(5) == (4, 5) and plan.stage(2) == (2, 3)


def test_a_plan_names_every_offender():
    with pytest.raises(ValueError, match="6 ranks cannot be divided into replicas of tp=2 x pp=2"):
        MeshPlan(world_size=6, tp=2, pp=2)
    with pytest.raises(ValueError, match=r"tp must be .*0; pp must be .*-1"):
        MeshPlan(world_size=4, tp=0, pp=-1)


def test_one_rank_needs_no_torch_distributed():
    mesh = Mesh.single()
    assert (mesh.tp, mesh.pp, mesh.dp, mesh.num_ranks, mesh.local_rank) == (1, 1, 1, 1, 0)
    assert mesh.is_controller and mesh.is_first_stage and mesh.is_last_stage and mesh.is_sampling_rank
    assert mesh.tp_group is mesh.replica_group is mesh.stage_group is None
    with pytest.raises(ValueError, match="launch with torchrun"):
        Mesh.build(2, 1)


def test_invariant_mode_wants_whole_k_blocks_on_every_rank_and_names_the_remedy():
    with pytest.raises(ValueError, match=r"k_blocks \(2\) must be a multiple of tp \(4\): set k_blocks to 4"):
        EngineConfig(tp=4, k_blocks=2)
    assert EngineConfig(tp=4, k_blocks=1, invariant=False).k_blocks == 1
    with pytest.raises(ValueError, match=r"tp must be a positive integer, not 0; pp must be .* rank_timeout_s must be"):
        EngineConfig(tp=0, pp=True, rank_timeout_s=0)


@pytest.mark.parametrize(
    "shapes", [((2, 1), (1, 2)), ((2, 1), (3, 1)), ((2, 1), (1, 1))], ids=["tp and pp", "no plan", "alone"]
)
def test_ranks_of_other_shapes_are_refused_by_name_on_all(run_world, shapes):
    def refused(rank: int) -> str:
        with pytest.raises(ValueError) as error:
            Mesh.build(*shapes[rank])
        dist.barrier()  # the default group goes on
        return str(error.value)

    texts = run_world(2, refused)
    assert len(set(texts)) == 1
    for rank, (tp, pp) in enumerate(shapes):
        assert f"rank {rank} has tp={tp} and pp={pp}" in texts[0]


def test_a_rank_for_which_no_other_comes_names_what_it_waits_for(tmp_path):
    def rank(rank: int) -> object:
        if rank == 1:
            threading.Event().wait()
        with pytest.raises(RankFailure, match=r"not every rank .* as rank 0 does with tp=2 and pp=1: waited 0\.5 s"):
            Mesh.build(2, 1, timeout_s=0.5)
        return "refused"

    assert run_survivors(2, tmp_path, rank, victim=1) == {0: "refused"}


def _sums(mesh: Mesh) -> list[float]:
    sums = []
    for group in (mesh.tp_group, mesh.replica_group, mesh.stage_group):
        value = torch.tensor(float(10**mesh.rank))
        if group is not None:
            dist.all_reduce(value, group=group)
        sums.append(value.item())
    return sums


def test_each_group_sums_over_its_own_ranks_only(run_world):
    def two_by_two(rank: int) -> list[list[float]]:
        return [_sums(Mesh.build(2, 2)), _sums(Mesh.build(1, 2)), _sums(Mesh.build(2, 1)), _sums(Mesh.build(1, 1))]

    results = run_world(4, two_by_two)
    everybody, first, second = 1111.0, 11.0, 1100.0
    assert [r[0] for r in results] == [[first, everybody, everybody]] * 2 + [[second, everybody, everybody]] * 2
    own = [10.0**rank for rank in range(4)]
    pair = [first, first, second, second]
    assert [r[1] for r in results] == [[own[rank], pair[rank], pair[rank]] for rank in range(4)]
    assert [r[2] for r in results] == [[pair[rank], pair[rank], own[rank]] for rank in range(4)]
    assert [r[3] for r in results] == [[own[rank]] * 3 for rank in range(4)]


def test_ranks_know_their_stage_and_their_neighbours(run_world):
    def place(rank: int) -> tuple[object, ...]:
        mesh = Mesh.build(1, 2)
        following = Coords(mesh.dp_rank, mesh.pp_rank + 1, mesh.tp_rank)
        next_stage = next((rank for rank in range(4) if mesh.plan.coords(rank) == following), None)
        return mesh.dp_rank, mesh.local_rank, mesh.is_controller, mesh.is_sampling_rank, next_stage

    assert run_world(4, place) == [
        (0, 0, True, False, 1), (0, 1, False, True, None), (1, 0, True, False, 3), (1, 1, False, True, None)
    ]  # fmt: skip
