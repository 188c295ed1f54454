"""The main job with engines of several ranks: the same rewards, digests and metrics as with one engine in each rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.integration.job_config import load_config
from lockstep.integration.run_log import read_metrics

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "arithmetic_cpu.toml"
SHRUNK = [
    "run.num_steps=3", "run.eval_every=3", "run.checkpoint_every=3", "run.timeout_s=120", "warm_start.num_steps=12",
    "warm_start.batch_size=16", "data.num_heldout=9", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_new_tokens=8", "model.num_layers=2", "model.hidden_size=64", "engine.kv_cache=4MiB",
    "engine.k_blocks=2", "reward=rewards_of_test:by_text",
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
with process_group(ranks, 120):
    for run in runs:
        config = load_config(config_path, [*common, *run.split()])
        if ranks.is_first:
            prepare_folder(config.folder, resume=False)
        with closing(GrpoJob(config, ranks, resume=False)) as job:
            job.run()
sys.stdout.flush()
os._exit(0)
"""
LAYOUTS = {"dp2": "", "tp2": "parallel.tp=2", "pp2": "parallel.pp=2"}
SAME = ("reward_mean", "loss", "kl", "grad_norm", "heldout_accuracy", "weight_version", "weight_digest", "logprob_gap")


def start_agent(folder: Path, *arguments: str, log: str = "log") -> subprocess.Popen:
    """Start torchrun in `folder`, its output in `folder`/`log`."""
    (folder / "rewards_of_test.py").write_text(REWARD)
    (folder / "jobs.py").write_text(JOBS)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    with open(folder / log, "w") as output:
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)


def finish(agents: Sequence[subprocess.Popen], folder: Path, timeout_s: float = 280) -> None:
    try:
        codes = [agent.wait(timeout_s) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # a launcher ends its ranks
    logs = "\n".join(path.read_text()[-4000:] for path in sorted(folder.glob("log*")))
    assert codes == [0] * len(agents), logs


def lines_of(folder: Path, name: str) -> list[dict[str, object]]:
    lines = read_metrics(folder / f"runs/{name}/metrics.jsonl")
    return [{key: line.get(key) for key in SAME} for line in lines]


def jobs(runs: dict[str, str]) -> list[str]:
    """Arguments of a launcher that runs these jobs, by name, one after the other."""
    return ["jobs.py", str(CONFIG), " ".join(SHRUNK), *(f"{run} run.name={name}" for name, run in runs.items())]


def check_same(lines: dict[str, list[dict[str, object]]]) -> None:
    first, *others = lines
    assert len({line["weight_digest"] for line in lines[first]}) == 3, "every step changes the weights"
    assert all(line["logprob_gap"] == 0.0 for line in lines[first])
    for other in others:
        assert lines[other] == lines[first], other


@pytest.mark.slow
def test_the_job_gives_the_same_numbers_however_its_ranks_share_engines(tmp_path):
    trainers = ("ddp", "fsdp2")
    runs = {f"{trainer}-{name}": f"trainer={trainer} {layout}" for trainer in trainers
            for name, layout in LAYOUTS.items()}  # fmt: skip
    finish([start_agent(tmp_path, "--nproc-per-node", "2", *jobs(runs))], tmp_path)
    for trainer in trainers:
        check_same({name: lines_of(tmp_path, name) for name in runs if name.startswith(trainer)})


@pytest.mark.slow
def test_two_replicas_of_two_ranks_each_give_the_numbers_of_four_engines(tmp_path):
    pytest.importorskip("deepspeed")
    runs = {
        "zero-dp4": "trainer=deepspeed deepspeed.zero_stage=3",
        "zero-tp2": "trainer=deepspeed deepspeed.zero_stage=3 parallel.tp=2",
        "zero-pp2": "trainer=deepspeed deepspeed.zero_stage=3 parallel.pp=2",
        "zero-tp2-pp2": "trainer=deepspeed deepspeed.zero_stage=3 parallel.tp=2 parallel.pp=2",
    }
    finish([start_agent(tmp_path, "--nproc-per-node", "4", *jobs(runs))], tmp_path)
    check_same({name: lines_of(tmp_path, name) for name in runs})


@pytest.mark.slow
def test_two_agents_give_the_numbers_of_one(tmp_path):
    """Two nodes as torchrun sees them, on one host."""
    layouts = {name: LAYOUTS[name] for name in ("dp2", "tp2")}
    one = {f"one-{name}": run for name, run in layouts.items()}
    two = {f"two-{name}": run for name, run in layouts.items()}
    finish([start_agent(tmp_path, "--nproc-per-node", "2", *jobs(one))], tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        start_agent(
            tmp_path, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", *jobs(two), log=f"log-of-node-{node}",
        )
        for node in range(2)
    ]  # fmt: skip
    finish(nodes, tmp_path)
    check_same({name: lines_of(tmp_path, name) for name in (*one, *two)})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tp=0"], "parallel.tp must be at least 1"),
        (["parallel.tp=2"], "engine.k_blocks must be a multiple of parallel.tp=2 in invariant mode, not 1"),
        (["parallel.pp=2", "sync=disk"], "sync must be \"in_place\", not 'disk'"),
        (["parallel.pp=2", "sync=tensor", "engines=separate"], "sync must be \"in_place\", not 'tensor'"),
        (["parallel.ep=2"], "unknown key parallel.ep"),
    ],
)
def test_settings_that_do_not_go_together_are_named(overrides, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        load_config(CONFIG, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.pp=3"], "parallel: 4 ranks cannot be divided into replicas of tp=1 x pp=3"),
        (["parallel.pp=4", "model.num_layers=3"], "parallel: pp=4 stages need at least as many layers"),
        (["parallel.tp=4", "engine.k_blocks=4", "model.num_heads=6", "model.num_kv_heads=3"], "not divide by tp=4"),
    ],
)
def test_a_job_that_cannot_be_divided_is_refused_before_it_starts(overrides, message):
    pytest.importorskip("matplotlib")
    from lockstep.integration.plan import check_job

    with pytest.raises(ValueError, match=message):
        check_job(load_config(CONFIG, overrides), num_ranks=4)


def test_the_plan_states_the_mesh_and_what_a_rank_holds_of_the_engine():
    from lockstep.integration.plan import describe_plan

    alone = describe_plan(load_config(CONFIG), num_ranks=8)
    assert "mesh       dp=8 x pp=1 x tp=1: 8 replicas of 1 rank" in alone and "aliases its weights" in alone
    shared = describe_plan(load_config(CONFIG, ["parallel.tp=2", "parallel.pp=2", "engine.k_blocks=2"]), num_ranks=8)
    assert "mesh       dp=2 x pp=2 x tp=2: 2 replicas of 4 ranks: 2 stages of 2 ranks" in shared
    assert "the engine's copy 0.6 MiB" in shared and "each rank copies its part" in shared
    assert "at 512 bytes a token" in shared and "at 2048 bytes a token" in alone
