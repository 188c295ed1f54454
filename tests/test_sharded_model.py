"""Models that ranks share: every division gives the bits of the undivided one, and each rank has only its part."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.kernels.paged_attention import PagedStep
from lockstep.rollout.hosted_attention import StepContext
from lockstep.rollout.hosted_model import HostedModel
from lockstep.rollout.mesh import Mesh

BLOCK_SIZE, BLOCKS_EACH = 16, 4
SEQUENCES = {0: 40, 1: 23}  # tokens by sequence
STEPS = [[(0, 0, 17)], [(0, 17, 18), (1, 0, 20)], [(0, 18, 37), (1, 20, 21)], [(0, 37, 40), (1, 21, 23)]]
OPTIONS = {"dtype": None, "device": None}
FLOATS = [torch.float32, torch.bfloat16]


@dataclass
class Rank:
    """Runs STEPS on one rank of a replica: its own KV, and hidden states from the stage before to the one behind."""

    hosted: HostedModel
    logits: list[Tensor] = field(default_factory=list)

    def run(self) -> list[Tensor]:
        """All logits of STEPS, on every rank of the last stage; nothing elsewhere."""
        hosted, mesh = self.hosted, self.hosted.mesh
        caches = [
            [
                torch.zeros(len(SEQUENCES) * BLOCKS_EACH, BLOCK_SIZE, s.num_kv_heads, dim, dtype=s.dtype)
                for s, dim in ((s, getattr(s, name)) for s in hosted.kv_shapes)
            ]
            for name in ("key_dim", "value_dim")
        ]
        with hosted.rollout_phase(), torch.inference_mode():
            for work in STEPS:
                tokens, positions, step = _step(work, caches)
                hidden = None
                if not mesh.is_first_stage:
                    hidden = torch.empty(len(positions), hosted.hidden_size, dtype=hosted.dtype)
                    dist.recv(hidden, mesh.world_rank_of(mesh.pp_rank - 1, mesh.tp_rank), group=mesh.stage_group)
                ids = tokens if mesh.is_first_stage else None
                out = hosted.forward(ids, positions, torch.arange(len(positions)), step, hidden)
                if mesh.is_last_stage:
                    self.logits.append(out)
                else:
                    dist.send(out.contiguous(), mesh.world_rank_of(mesh.pp_rank + 1, mesh.tp_rank), mesh.stage_group)
        return self.logits


def _tokens(sequence: int) -> Tensor:
    return torch.randint(0, 256, (SEQUENCES[sequence],), generator=torch.Generator().manual_seed(sequence))


def _step(work: list[tuple[int, int, int]], caches: list[list[Tensor]]) -> tuple[Tensor, Tensor, StepContext]:
    tables = torch.arange(len(SEQUENCES) * BLOCKS_EACH, dtype=torch.int32).view(len(SEQUENCES), -1)
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in work])
    owners = torch.cat([torch.full((stop - start,), sequence) for sequence, start, stop in work])
    starts = torch.tensor([0, *(stop - start for _, start, stop in work)], dtype=torch.int32).cumsum(0)
    lengths = torch.tensor([stop for _, _, stop in work], dtype=torch.int32)
    paged = PagedStep(tables[[sequence for sequence, _, _ in work]], starts.to(torch.int32), lengths)
    tokens = torch.cat([_tokens(sequence)[start:stop] for sequence, start, stop in work])
    return tokens, positions, StepContext(owners * BLOCKS_EACH * BLOCK_SIZE + positions, paged, *caches)


def _undivided(model: PreTrainedModel, invariant: bool = True, k_blocks: int = 4) -> HostedModel:
    return HostedModel.adopt(model, **OPTIONS, invariant=invariant, k_blocks=k_blocks)


def _same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right, strict=True)
    )


def _divided_gives_the_same(run_world, model: PreTrainedModel, tp: int, pp: int, k_blocks: int = 4) -> None:
    def on_rank(rank: int) -> tuple[bool, bool]:
        expected = Rank(_undivided(model, k_blocks=k_blocks)).run()
        mesh = Mesh.build(tp, pp)
        hosted = HostedModel.adopt(model, **OPTIONS, invariant=True, k_blocks=k_blocks, mesh=mesh)
        logits = Rank(hosted).run()
        return mesh.is_last_stage, _same_bits(logits, expected)

    results = run_world(tp * pp, on_rank)
    assert results == [(True, True) if rank >= tp * (pp - 1) else (False, False) for rank in range(tp * pp)]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_two_ranks_and_two_stages_give_the_bits_of_one(make_model, run_world, family):
    _divided_gives_the_same(run_world, make_model(family, torch.bfloat16), 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"])
def test_every_division_gives_the_bits_of_one_rank(make_model, run_world, family, tp, pp, dtype):
    _divided_gives_the_same(run_world, make_model(family, dtype, num_hidden_layers=4), tp, pp)
