"""Tests of jobs in which a rank is killed or stopped, in every phase: the others name it, and the job goes on."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from lockstep.integration.grpo.results.run_log import read_metrics
from lockstep.tests.support import prepared_python
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.job_launcher import CONFIG

RANK_TIMEOUT_S = 6
SETTINGS = [
    "run.eval_every=4", "run.checkpoint_every=1", "run.timeout_s=60", "warm_start.num_steps=4",
    "warm_start.batch_size=16", "data.num_heldout=8", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_new_tokens=8", "model.num_layers=2", "model.hidden_size=64", "engine.kv_cache=4MiB",
    "engine.k_blocks=2", f"engine.rank_timeout_s={RANK_TIMEOUT_S}", "reward=faults_of_test:by_text",
    "train.learning_rate=1e-3",
]  # fmt: skip
# The fault happens in the training step after this many.
REWARD = """
import os, signal, threading, urllib.request
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.integration.service import RolloutService

rank = int(os.environ["RANK"])
phase, kind, victim, num_steps_before = os.environ["FAULT"].split()
victim, num_steps_before, paused = int(victim), int(num_steps_before), Path("paused" + num_steps_before)

def by_text(prompt, completion, answer):
    if phase == "reward" and rank == victim and is_time():
        raise ArithmeticError("no reward for this")
    return sum(map(ord, completion)) % 97 / 97

def is_time():
    log = Path("runs/arithmetic/metrics.jsonl")
    return log.exists() and log.read_text().count("\\n") >= num_steps_before

def strike():
    os.kill(os.getpid(), getattr(signal, kind))

def pause():
    url, body = f"http://127.0.0.1:{os.environ['PORT']}/pause_generation", b'{"mode": "in_place"}'
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    paused.touch()

def strike_when_paused():
    while not paused.exists():
        threading.Event().wait(0.01)
    threading.Event().wait(0.5)
    strike()

class Hook:
    num_forwards = 0

    def __call__(self, module, inputs):
        if not torch.is_inference_mode_enabled() or type(module).__name__ != "Qwen3Model" or not is_time():
            return
        self.num_forwards += 1
        if self.num_forwards == 3 and phase == "generation" and rank == victim:
            strike()
        if self.num_forwards == 1 and phase == "paused":
            for what in [pause] * (rank == 0) + [strike_when_paused] * (rank == victim):
                threading.Thread(target=what, daemon=True).start()
            threading.Event().wait(0.5 * (rank == 0))  # the pause is asked for while this step runs

register_module_forward_pre_hook(Hook())
update = RolloutService.update_weights_from_named_tensors

def update_or_strike(self, named_tensors, **others):
    def until_it_is_time():
        for index, pair in enumerate(named_tensors):
            if index == 3 and phase == "update" and rank == victim and is_time():
                strike()
            yield pair

    return update(self, until_it_is_time(), **others)

RolloutService.update_weights_from_named_tensors = update_or_strike
"""
NO_FAULT = ("none", "SIGTERM", -1)
FAULTS = [(phase, kind, rank) for phase in ("generation", "update", "paused") for rank in (0, 1)
          for kind in ("SIGKILL", "SIGSTOP")]  # fmt: skip
# Every phase, each kind on each rank, both layouts. That each kind is noticed in each phase is shown of engines in
# test_rank_failures.py and integration/weights/test_sharded_failures.py.
EACH_ONCE = [("generation", "SIGKILL", 0), ("update", "SIGKILL", 1), ("update", "SIGSTOP", 0), ("paused", "SIGSTOP", 1)]
SAME = ("step", "reward_mean", "logprob_gap", "loss", "weight_version", "weight_digest", "eval_reward_mean")
LAST_LINE = re.compile(
    r"lockstep: error: rank (?P<speaker>\d) stops in training step (?P<training_step>\d+): rank (?P<culprit>\d) "
    r"\(stage \d, tp \d\) .*\(in phase '[^']+', step -?\d+, last heard [\d.]+ s ago\)"
)


def layout_of(fault: tuple[str, str, int]) -> str:
    """Choose a layout for a phase, so that both are used. The numbers do not depend on it."""
    _, kind, rank = fault
    return "parallel.tp=2" if (rank == 1) == (kind == "SIGSTOP") else "parallel.pp=2"


def run_job(folder: Path, layout: str, num_steps: int, fault: tuple[str, str, int], num_steps_before: int) -> int:
    """Run the job to its end or to its fault, with its output in `folder`/log; returns the exit code."""
    (folder / "faults_of_test.py").write_text(REWARD)
    port = free_port()
    fault_text = " ".join(map(str, (*fault, num_steps_before)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FAULT": fault_text, "PORT": str(port)}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--shutdown-timeout",
        "3", "-m", "lockstep.integration.grpo", str(CONFIG), *SETTINGS, layout, f"run.num_steps={num_steps}",
        f"http.port={port}", "--resume",
    ]  # fmt: skip
    with open(folder / "log", "w") as log:
        process = prepared_python.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        try:
            return process.wait(150)
        finally:
            process.terminate()  # a launcher ends its ranks
            process.wait(60)


def lines_of(folder: Path) -> list[dict[str, object]]:
    lines = read_metrics(folder / "runs/arithmetic/metrics.jsonl")
    return [{key: line.get(key) for key in SAME} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(EACH_ONCE, id="each-once", marks=pytest.mark.timeout(1200)),
        pytest.param(FAULTS, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_a_lost_rank_is_named_and_the_job_goes_on_where_it_was(tmp_path, faults):
    pytest.importorskip("uvicorn")
    straight, faulty = tmp_path / "straight", tmp_path / "faulty"
    num_steps = len(faults) + 2
    for folder in (straight, faulty):
        folder.mkdir()
    assert run_job(straight, "parallel.tp=2", num_steps, NO_FAULT, 0) == 0, (straight / "log").read_text()[-4000:]
    (faulty / ".cache").symlink_to(straight / ".cache")  # the warm start is shared

    for number, fault in enumerate(faults):
        assert run_job(faulty, layout_of(fault), num_steps, fault, number + 1) != 0, fault
        check_last_lines((faulty / "log").read_text(), fault, training_step=number + 2)
        assert len(lines_of(faulty)) == number + 1, fault
    assert run_job(faulty, "parallel.pp=2", num_steps, NO_FAULT, 0) == 0, (faulty / "log").read_text()[-4000:]
    assert lines_of(faulty) == lines_of(straight)


@pytest.mark.slow
def test_a_rank_whose_reward_fails_says_so_and_is_named_by_the_other(tmp_path):
    assert run_job(tmp_path, "parallel.pp=2", 4, ("reward", "SIGTERM", 1), 1) != 0
    log = (tmp_path / "log").read_text()
    assert "lockstep: error: rank 1 stops in training step 2: ArithmeticError: no reward for this" in log
    assert "traceback : lockstep: error: rank" in log[-3000:], log[-6000:]


def check_last_lines(log: str, fault: tuple[str, str, int], training_step: int) -> None:
    _, kind, victim = fault
    end, said = log[-3000:], list(LAST_LINE.finditer(log))
    assert said, (fault, log[-6000:])
    for line in said:
        assert (line["speaker"], line["culprit"]) == (str(1 - victim), str(victim)), (fault, line[0])
        assert int(line["training_step"]) == training_step, (fault, line[0])
    # The launcher's report, which ends the log, tells the same.
    if kind == "SIGKILL":
        assert f"rank      : {victim} (local_rank: {victim})" in end and "SIGKILL" in end, (fault, end)
    else:
        assert f"traceback : {said[0][0]}" in end, (fault, end)
