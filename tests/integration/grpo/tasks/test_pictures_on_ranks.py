"""The job with pictures on two ranks: engines that share a model give the numbers of an engine in each rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("PIL.Image")

from lockstep.integration.grpo.job import GrpoJob
from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.results.run_folder import prepare_folder
from lockstep.integration.ranks import Ranks
from lockstep.tests.integration.grpo.tasks.test_pictures import SMALL, STEPS, config_of, example

__all__ = ["example"]


def test_two_ranks_of_one_engine_train_as_two_engines(
    example: Path, tmp_path: Path, run_world: Callable[..., list[object]]
) -> None:
    def rank(rank: int) -> object:
        found = []
        for name, layout in (("dp2", []), ("tp2", ["parallel.tp=2"])):
            config = config_of(
                example, tmp_path, *SMALL, f"run.name={name}", "run.num_steps=2", "trainer=ddp", "engine.k_blocks=2",
                *layout,
            )  # fmt: skip
            check_job(config, 2)
            if rank == 0:
                prepare_folder(config.folder, resume=False)
            dist.barrier()
            job = GrpoJob(config, Ranks(rank, 2, torch.device("cpu")), resume=False)
            job.run()
            job.close()
            dist.barrier()
            lines = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
            found.append([{key: line[key] for key in STEPS} for line in lines if "logprob_gap" in line])
        return found

    for alone, shared in run_world(2, rank):
        assert alone == shared and len(alone) == 2
        assert all(line["logprob_gap"] == 0.0 for line in alone)
