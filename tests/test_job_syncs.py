"""The main job with every trainer and every way its weights can go to the engines: the same digests and rewards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.integration.run_log import read_metrics

CONFIG = Path(__file__).parent.parent / "configs" / "arithmetic_cpu.toml"
SHRUNK = [
    "run.num_steps=3", "run.eval_every=3", "run.checkpoint_every=3", "run.timeout_s=60", "warm_start.num_steps=12",
    "warm_start.batch_size=16", "data.num_heldout=8", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_new_tokens=8", "model.num_layers=2", "model.hidden_size=64", "engine.kv_cache=4MiB",
    "reward=rewards_of_test:by_text",
]  # fmt: skip
# A reward that tells samples of an untrained model apart, so that every step changes the weights.
REWARD = """
def by_text(prompt, completion, answer):
    return float(sum(map(ord, completion)) % 3)
"""
# One process group for several jobs: what costs is the start of the interpreters.
JOBS = """
import os, sys
from contextlib import closing
from lockstep.integration.grpo import prepare_folder
from lockstep.integration.grpo_job import GrpoJob
from lockstep.integration.job_config import load_config
from lockstep.integration.ranks import process_group, this_rank

config_path, common, runs = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
ranks = this_rank("")
with process_group(ranks, 60):
    for run in runs:
        config = load_config(config_path, [*common, *run.split()])
        if ranks.is_first:
            prepare_folder(config.folder, resume=False)
        with closing(GrpoJob(config, ranks, resume=False)) as job:
            job.run()
sys.stdout.flush()
os._exit(0)
"""
SYNCS = {
    "in_place": "sync=in_place",
    "distributed": "sync=distributed",
    "tensor": "sync=tensor weights.bucket_bytes=64KiB",
    "disk": "sync=disk",
    "delta": "sync=delta",
    "separate": "sync=distributed engines=separate",
}


def run_jobs(folder: Path, *runs: str) -> None:
    """Run jobs of two ranks one after the other; `runs` are their settings beside the common ones."""
    (folder / "rewards_of_test.py").write_text(REWARD)
    (folder / "jobs.py").write_text(JOBS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "jobs.py", str(CONFIG)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
    }
    with open(folder / "log", "w") as log:
        process = subprocess.run(
            [*command, " ".join(SHRUNK), *runs], cwd=folder, stdout=log, stderr=log, timeout=280, env=environment
        )
    assert process.returncode == 0, (folder / "log").read_text()[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer", ["trainer=ddp", "trainer=fsdp2", "trainer=deepspeed", "trainer=deepspeed deepspeed.zero_stage=3"]
)
def test_every_sync_gives_the_same_rewards_digests_and_a_gap_of_zero(tmp_path, trainer):
    if "deepspeed" in trainer:
        pytest.importorskip("deepspeed")
    run_jobs(tmp_path, *(f"{trainer} {sync} run.name={name}" for name, sync in SYNCS.items()))
    lines = {name: read_metrics(tmp_path / f"runs/{name}/metrics.jsonl") for name in SYNCS}
    digests = {name: [line["weight_digest"] for line in of_run] for name, of_run in lines.items()}
    assert len(set(digests["in_place"])) == 3, "every step changes the weights"
    for name, of_run in lines.items():
        assert digests[name] == digests["in_place"], name
        for key in ("reward_mean", "loss", "heldout_accuracy"):
            assert [line.get(key) for line in of_run] == [line.get(key) for line in lines["in_place"]], (name, key)
        assert all(line["logprob_gap"] == 0.0 for line in of_run), name
        assert [line["weight_version"] for line in of_run] == ["1", "2", "3"]
    aliased = trainer == "trainer=ddp" or trainer.endswith("deepspeed")
    assert all((line["sync_bytes"] == 0) == aliased for line in lines["in_place"])
    assert all(line["sync_bytes"] > 0 for name, of_run in lines.items() if name != "in_place" for line in of_run)
