"""The main job under torchrun, shrunk to seconds: several jobs in one process group, and their logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.integration.grpo.results.run_log import read_metrics
from lockstep.tests.support import prepared_python

CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic_cpu.toml"
SHRUNK = [
    "run.num_steps=3", "run.eval_every=3", "run.checkpoint_every=3", "run.timeout_s=120", "warm_start.num_steps=12",
    "warm_start.batch_size=16", "data.num_heldout=9", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_new_tokens=8", "model.num_layers=2", "model.hidden_size=64", "engine.kv_cache=4MiB",
    "engine.k_blocks=2", "reward=rewards_of_test:by_text",
]  # fmt: skip
# A reward that differs between samples of an untrained model, so that every step changes the weights.
REWARD = """
def by_text(prompt, completion, answer):
    return float(sum(map(ord, completion)) % 3)
"""
# One process group for several jobs: most of the cost is the start of the interpreters.
JOBS = """
import os, sys
from contextlib import closing
from lockstep.integration.grpo.results.run_folder import prepare_folder
from lockstep.integration.grpo.job import GrpoJob
from lockstep.integration.grpo.settings.config import load_config
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


def jobs(runs: Mapping[str, str]) -> list[str]:
    """Return the arguments of a launcher that runs these jobs one after the other. runs: settings by name."""
    return ["jobs.py", str(CONFIG), " ".join(SHRUNK), *(f"{run} run.name={name}" for name, run in runs.items())]


def start_agent(folder: Path, *arguments: str, log: str = "log") -> prepared_python.Popen:
    """Start torchrun in `folder` with its output in `folder`/`log`."""
    (folder / "rewards_of_test.py").write_text(REWARD)
    (folder / "jobs.py").write_text(JOBS)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        prepared_python.FORKS_ENGINES: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    with open(folder / log, "w") as output:
        return prepared_python.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)


def finish(agents: Sequence[prepared_python.Popen], folder: Path, timeout_s: float = 400) -> None:
    """Wait for all launchers to end. Fails if one has an exit code other than 0."""
    try:
        codes = [agent.wait(timeout_s) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # a launcher ends its ranks
            agent.wait(60)
    logs = "\n".join(path.read_text()[-4000:] for path in sorted(folder.glob("log*")))
    assert codes == [0] * len(agents), logs


def run_jobs(folder: Path, num_ranks: int, runs: Mapping[str, str]) -> None:
    """Run these jobs on `num_ranks` ranks."""
    finish([start_agent(folder, "--standalone", "--nproc-per-node", str(num_ranks), *jobs(runs))], folder)


def log_of(folder: Path, name: str) -> list[dict[str, object]]:
    """Read the metrics that the job of that name wrote for each step."""
    return read_metrics(folder / f"runs/{name}/metrics.jsonl")
