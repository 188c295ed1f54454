"""The main job as its users run it: torchrun, two ranks, and a config that takes seconds."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.integration.grpo import main as grpo
from lockstep.integration.grpo.backends.backend import Gathering
from lockstep.integration.grpo.main import main
from lockstep.integration.grpo.results.run_log import read_metrics
from lockstep.integration.grpo.rewards.scorer import Scorer
from lockstep.integration.grpo.settings.config import load_config
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.ranks import Ranks
from lockstep.integration.service import RolloutService
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import BrokenLogits
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import has_ended
from lockstep.weight_sync.digests.model_digest import model_digest

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "arithmetic_cpu.toml"
SHRUNK = [
    "run.num_steps=4", "run.eval_every=2", "run.checkpoint_every=2", "run.timeout_s=60", "warm_start.num_steps=12",
    "warm_start.batch_size=16", "data.num_heldout=16", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "model.num_layers=2", "model.hidden_size=64", "engine.kv_cache=4MiB", "reward=text_reward:by_text",
    "train.learning_rate=1e-3",
]  # fmt: skip
BEST = "checkpoints.best=true"
# This reward differs between samples of an untrained model, so that every step changes the weights. It also kills the
# whole job, like kill -9 from outside, when its log has KILL_AFTER_STEP steps, and waits for ever (nothing opens the
# pipe's other end) when it has HOLD_AFTER_STEP.
REWARD = """
import os, signal
from pathlib import Path

launcher = os.getppid()  # another process's child once the launcher is killed

def by_text(prompt, completion, answer):
    after, log = int(os.environ.get("KILL_AFTER_STEP", "0")), Path("runs/arithmetic/metrics.jsonl")
    if after and log.exists() and log.read_text().count("\\n") >= after:
        ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for pid in [launcher, *(int(rank) for rank in ranks if int(rank) != os.getpid()), os.getpid()]:
            os.kill(pid, signal.SIGKILL)
    hold = int(os.environ.get("HOLD_AFTER_STEP", "0"))
    if hold and log.exists() and log.read_text().count("\\n") >= hold:
        open("pipe").read()
    return sum(map(ord, completion)) % 97 / 97
"""
BASE = "base_model_name_or_path"
SECONDS = ("rollout_s", "reward_s", "train_s", "sync_s")
SAME_IN_EVERY_RUN = ("step", "reward_mean", "logprob_gap", "sync_bytes", "weight_version", "weight_digest",
                     "eval_reward_mean", "loss")  # fmt: skip


def torchrun(folder: Path, *arguments: str, num_ranks: int = 2, **environment: object) -> subprocess.Popen:
    """Start the job in `folder`, in a process group of its own, its output in `folder`/log."""
    (folder / "text_reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
               "-m", "lockstep.integration.grpo", *arguments]  # fmt: skip
    with open(folder / "log", "w") as log:
        values = os.environ | {name: str(value) for name, value in environment.items()}
        return prepared_python.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True, env=values)


def finish(process: subprocess.Popen, seconds: float = 150) -> int:
    try:
        return process.wait(seconds)
    finally:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """End the launcher and its ranks, each in a session of its own, at once."""
    if process.poll() is None:
        for pid in [process.pid, *children_of(process)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def children_of(launcher: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    ranks = {prepared_python.rank_of(pid): pid for pid in children_of(launcher)}
    return [ranks[rank] for rank in range(len(ranks) - (None in ranks))]


def lines_of(folder: Path) -> list[dict[str, object]]:
    lines = read_metrics(folder / "runs/arithmetic/metrics.jsonl")
    return [{key: line.get(key) for key in SAME_IN_EVERY_RUN} for line in lines]


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory):
    """Run the job once without interruption, for several tests."""
    folder = tmp_path_factory.mktemp("straight")
    assert finish(torchrun(folder, str(CONFIG), *SHRUNK, BEST)) == 0, (folder / "log").read_text()
    return folder


def test_two_ranks_train_with_a_gap_of_zero_and_no_byte_moved(straight_run):
    lines = read_metrics(straight_run / "runs/arithmetic/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["logprob_gap"] == 0.0 and line["sync_bytes"] == 0 for line in lines)
    assert [line["weight_version"] for line in lines] == ["1", "2", "3", "4"]
    assert len({line["weight_digest"] for line in lines}) == 4, "every step changes the weights"
    assert [("eval_reward_mean" in line) for line in lines] == [False, True, False, True]
    assert all(line[key] > 0 for line in lines for key in ("rollout_tokens_per_s", *SECONDS))
    assert (straight_run / "runs/arithmetic/progress.png").stat().st_size > 1000
    assert "held-out mean reward:" in (straight_run / "log").read_text()


def test_the_trained_model_loads_in_transformers_and_is_what_was_committed_last(straight_run):
    folder = straight_run / "runs/arithmetic/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "What is 12 + 34?\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    last = read_metrics(straight_run / "runs/arithmetic/metrics.jsonl")[-1]
    assert model.dtype == torch.float32
    assert model_digest(model.named_parameters()) == last["weight_digest"]


def test_the_best_model_is_that_of_the_first_largest_mean_reward(straight_run):
    folder = straight_run / "runs/arithmetic"
    evaluated = [line for line in read_metrics(folder / "metrics.jsonl") if "eval_reward_mean" in line]
    best = max(evaluated, key=lambda line: line["eval_reward_mean"])  # the first of equal ones
    found = json.loads((folder / "best/evaluation.json").read_text())
    assert found == {key: best[key] for key in found} and found["step"] in (2, 4)
    model = AutoModelForCausalLM.from_pretrained(folder / "best")
    assert model_digest(model.named_parameters()) == found["weight_digest"]
    assert not list(folder.glob(".*.removed"))


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_as_an_uninterrupted_one(straight_run, tmp_path):
    """It is killed before the first checkpoint, then between two."""
    os.symlink(straight_run / ".cache", tmp_path / ".cache")  # the warm start is shared, so it is skipped
    for kill_after_step, resume in ((1, []), (3, ["--resume"])):
        process = torchrun(tmp_path, str(CONFIG), *SHRUNK, BEST, *resume, KILL_AFTER_STEP=kill_after_step)
        assert finish(process) == -signal.SIGKILL
        assert len(lines_of(tmp_path)) == kill_after_step, (tmp_path / "log").read_text()
    assert finish(torchrun(tmp_path, str(CONFIG), *SHRUNK, BEST, "--resume")) == 0, (tmp_path / "log").read_text()
    assert lines_of(tmp_path) == lines_of(straight_run)
    evaluations = [(one / "runs/arithmetic/best/evaluation.json").read_text() for one in (tmp_path, straight_run)]
    assert evaluations[0] == evaluations[1]
    assert "warm start" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_an_ended_run_whose_metrics_were_lost_is_resumed_to_its_last_line(straight_run, tmp_path):
    os.symlink(straight_run / ".cache", tmp_path / ".cache")
    shutil.copytree(straight_run / "runs", tmp_path / "runs")
    (tmp_path / "runs/arithmetic/metrics.jsonl").unlink()
    assert finish(torchrun(tmp_path, str(CONFIG), *SHRUNK, BEST, "--resume")) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert re.search(r"held-out mean reward: [\d.]+% before, - after 4 steps", log) and "lacks 4 of the 4 steps" in log


@pytest.mark.slow
def test_a_checkpoint_with_other_weights_than_its_digest_says_is_not_resumed(straight_run, tmp_path):
    os.symlink(straight_run / ".cache", tmp_path / ".cache")
    shutil.copytree(straight_run / "runs", tmp_path / "runs")
    newest = sorted((tmp_path / "runs/arithmetic/checkpoints").iterdir())[-1]
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-100] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    saved = json.loads((newest / "state.json").read_text())
    del saved["sha256"]  # of the file, which would tell first
    (newest / "state.json").write_text(json.dumps(saved))
    assert finish(torchrun(tmp_path, str(CONFIG), *SHRUNK, "run.num_steps=9", "--resume")) != 0
    said = f"{newest.name} holds other weights than the run had there"
    assert said in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_policy_that_diverges_ends_the_job_in_one_line_with_the_step(straight_run, tmp_path):
    os.symlink(straight_run / ".cache", tmp_path / ".cache")
    settings = ["train.learning_rate=1e30", "train.num_warmup_steps=0", "run.num_steps=4"]
    assert finish(torchrun(tmp_path, str(CONFIG), *SHRUNK, *settings)) != 0
    log = (tmp_path / "log").read_text()
    said = [line for line in log.splitlines() if line.startswith("lockstep: error: ")]
    assert len(said) == 1 and "training step 2: the model's logits are NaN" in said[0] and "--resume" in said[0], log
    assert "BrokenLogits" not in log


@pytest.mark.slow
def test_a_job_without_drafts_has_the_same_rewards_and_digests(straight_run, tmp_path):
    os.symlink(straight_run / ".cache", tmp_path / ".cache")
    more = ["rollout.max_new_tokens=40", "run.num_steps=6"]  # answers run on in circles: there is much to repeat
    lines = {}
    for speculation in ("auto", "off"):
        (folder := tmp_path / speculation).mkdir()
        os.symlink(straight_run / ".cache", folder / ".cache")
        arguments = [str(CONFIG), *SHRUNK, *more, f"engine.speculation={speculation}"]
        assert finish(torchrun(folder, *arguments)) == 0, (folder / "log").read_text()
        lines[speculation] = lines_of(folder)
        log = read_metrics(folder / "runs/arithmetic/metrics.jsonl")
        assert (sum(line["accepted_drafts"] for line in log) > 0) == (speculation == "auto")
    assert lines["auto"] == lines["off"]


@pytest.mark.slow
def test_a_job_with_adapters_moves_no_byte_and_resumes_with_the_same_digests(straight_run, tmp_path):
    folders = [tmp_path / "straight", tmp_path / "killed"]
    settings = [*SHRUNK, "train.lora.rank=4", "train.lora.alpha=8", "train.kl_coefficient=0.1"]
    for folder in folders:
        folder.mkdir()
        os.symlink(straight_run / ".cache", folder / ".cache")
    straight, killed = folders
    assert finish(torchrun(straight, str(CONFIG), *settings)) == 0, (straight / "log").read_text()
    assert finish(torchrun(killed, str(CONFIG), *settings, KILL_AFTER_STEP=3)) == -signal.SIGKILL
    saved = load_file(killed / "runs/arithmetic/checkpoints/step-000002/model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    assert finish(torchrun(killed, str(CONFIG), *settings, "--resume")) == 0, (killed / "log").read_text()
    lines = lines_of(straight)
    assert lines == lines_of(killed) and len({line["weight_digest"] for line in lines}) == 4
    assert all(line["logprob_gap"] == 0.0 and line["sync_bytes"] == 0 for line in lines)

    trained = straight / "runs/arithmetic/model"
    assert not (trained / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(json.loads((trained / "adapter_config.json").read_text())[BASE])
    peft = pytest.importorskip("peft")
    service = RolloutService(Engine(peft.PeftModel.from_pretrained(base, trained), EngineConfig(kv_cache="16 blocks")))
    assert service.model_digest() == lines[-1]["weight_digest"]
    service.close()


@pytest.mark.slow
def test_a_job_on_a_full_disk_and_one_without_its_launcher_end_and_are_resumed(straight_run, tmp_path, capfd, until):
    """Three starts of one run: the first checkpoint does not fit; torchrun is killed alone; to the end."""
    os.symlink(straight_run / ".cache", tmp_path / ".cache")
    os.mkfifo(tmp_path / "pipe")
    # The limit is that of the shell and of all processes below it; the log is a pipe.
    command = f"ulimit -f 100; exec {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    command += f" -m lockstep.integration.grpo {CONFIG} {' '.join(SHRUNK)} 2>&1"
    (tmp_path / "text_reward.py").write_text(REWARD)
    process = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    log = process.communicate(timeout=150)[0]
    assert process.returncode == 1 and log.count("lockstep: error:") == 1, log
    assert (
        "lockstep: error: runs/arithmetic/checkpoints/step-000002 cannot be written: File too large; make room" in log
    )
    assert "--resume" in log and log.count("Traceback") == 1 and "ChildFailedError" in log, log  # torchrun's own
    assert list((tmp_path / "runs/arithmetic/checkpoints").iterdir()) == []

    process = torchrun(tmp_path, str(CONFIG), *SHRUNK, "--resume", HOLD_AFTER_STEP=3)
    try:
        until(lambda: len(lines_of(tmp_path)) == 3 or process.poll() is not None, 150)
        first, second = ranks_of(process)
        assert main([str(CONFIG), f"run.dir={tmp_path}/runs", "--resume"]) == 2
        assert f"is used by process {first} on host" in capfd.readouterr().err
        process.kill()
        until(lambda: has_ended(first) and has_ended(second))
    finally:
        kill(process)
    assert finish(torchrun(tmp_path, str(CONFIG), *SHRUNK, "--resume")) == 0, (tmp_path / "log").read_text()
    assert lines_of(tmp_path) == lines_of(straight_run)


@pytest.mark.slow
def test_a_rank_that_fails_brings_the_other_down_within_seconds(straight_run, tmp_path):
    (tmp_path / "failing_reward.py").write_text(
        "import os\n\ndef reward(prompt, completion, answer):\n"
        "    if os.environ['RANK'] == '1':\n        raise RuntimeError('reward of rank 1 failed')\n    return 1.0\n"
    )
    os.symlink(straight_run / ".cache", tmp_path / ".cache")
    process = torchrun(tmp_path, str(CONFIG), *SHRUNK, "reward=failing_reward:reward", "run.timeout_s=600")
    assert finish(process) != 0
    assert "reward of rank 1 failed" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_own_data_model_and_reward(straight_run, tmp_path):
    problems = [{"question": f"Say {n}:", "solution": n} for n in range(10, 40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    reward = "def length(prompt, completion, answer):\n    return min(len(completion), 24) / 24\n"
    (tmp_path / "my_reward.py").write_text(reward)
    process = torchrun(
        tmp_path, str(CONFIG), *SHRUNK, f"model.path={straight_run}/runs/arithmetic/model", "warm_start.enabled=false",
        "data.path=data.jsonl", "data.prompt_field=question", "data.answer_field=solution", "reward=my_reward:length",
        "model.dtype=bfloat16", "run.tensorboard=true",
    )  # fmt: skip
    assert finish(process) == 0, (tmp_path / "log").read_text()
    lines = read_metrics(tmp_path / "runs/arithmetic/metrics.jsonl")
    assert [line["logprob_gap"] for line in lines] == [0.0] * 4
    assert all(0 < line["reward_mean"] <= 1 for line in lines)
    assert list((tmp_path / "runs/arithmetic/tensorboard").iterdir())


def run_alone(capsys, *arguments: str) -> tuple[int, str]:
    code = main([str(CONFIG), *arguments])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.speed=1"], "unknown key run.speed"),
        (["run.num_steps=few"], "run.num_steps must be a whole number"),
        (["data.path=empty.jsonl"], "empty.jsonl: holds no problems"),
        (["data.path=broken.jsonl"], "broken.jsonl:2: "),
        (["data.path=long.jsonl"], "long.jsonl:3: the prompt has"),
        (["data.path=nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["rollout.max_new_tokens=64"], "rollout.max_new_tokens"),
        (["reward=nowhere:reward"], "reward 'nowhere:reward': cannot import"),
        (["model.path=nowhere", "warm_start.enabled=false"], "model.path: 'nowhere'"),
        (["run.num_ranks=3"], "run.num_ranks is 3"),
        (["engine.device=cuda"], "engine.device is 'cuda'"),
        (["engine.kv_cache=lots"], "kv_cache must be"),
        (["model.hidden_size=33"], "hidden_size=33"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, overrides, message):
    if overrides == ["engine.device=cuda"] and torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    good = json.dumps({"prompt": "What is 1 + 1?", "answer": "2"}) + "\n"
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text(good + '{"prompt": "What?"}\n')
    long = json.dumps({"prompt": "1 + " * 100, "answer": "2"}) + "\n"
    (tmp_path / "long.jsonl").write_text(good * 2 + long + good * 9)
    code, err = run_alone(capsys, *overrides)
    assert code == 2
    assert err.count("\n") == 1 and err.startswith("lockstep: error: ") and message in err


def test_check_prints_the_plan_of_every_shipped_config(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ("arithmetic_cpu.toml", "eight_gpus.toml"):
        assert main([str(ROOT / "configs" / name), "--check"]) == 0
        plan = capsys.readouterr().out
        for part in ("M parameters", "ranks ", "prompts x", "memory     per rank: weights", "KV pool"):
            assert part in plan, (name, plan)
    assert "ranks      8" in plan


@pytest.mark.parametrize("fails", [False, True])
def test_the_job_is_freed_before_the_group_that_its_model_holds_ends(monkeypatch, tmp_path, fails):
    class Job:
        step = 0
        engine = None

        def __init__(self, config, ranks, *, resume):
            self.itself, jobs[:] = self, [weakref.ref(self)]

        def run(self):
            if fails:
                raise ValueError("no such model")

        def close(self):
            pass

    def end_group():
        assert jobs[0]() is None
        ended.append(True)
        end()

    jobs, ended, end = [], [], torch.distributed.destroy_process_group
    monkeypatch.setattr("lockstep.integration.grpo.job.GrpoJob", Job)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", end_group)
    assert main([str(CONFIG), f"run.dir={tmp_path}"]) == (2 if fails else 0)
    assert ended


def test_each_sample_is_told_to_the_other_ranks_which_meet_after_the_last_one():
    pytest.importorskip("matplotlib")
    from lockstep.integration.grpo.job import GrpoJob

    ranks, seen = Ranks(0, 2, torch.device("cpu")), []
    ranks.activity.meeting = lambda: seen.append("meets")

    def samples():
        for sample in "ab":
            seen.append(ranks.activity.doing)
            yield sample

    job = SimpleNamespace(ranks=ranks, _progress=lambda: 0, config=SimpleNamespace(environment=""))
    with ranks.activity.of("training"):
        for sample in GrpoJob._followed(job, samples()):
            seen += [sample, ranks.activity.doing, ranks.activity.progress]
    assert seen == ["scoring", "a", "training", 1, "scoring", "b", "training", 2, "meets"]


def test_weights_that_are_no_numbers_are_not_saved_for_a_resume():
    from lockstep.integration.grpo.saving import FiniteTensors

    state = {"fine": torch.ones(2), "broken": torch.tensor([1.0, float("nan")]), "last": torch.ones(1)}
    tensors = Gathering(list(state), lambda: iter(state.items()), Ranks(0, 1, torch.device("cpu")))
    assert [name for name, _ in tensors] == list(state)
    with pytest.raises(BrokenLogits, match=r"trained weights are not finite: broken$"):
        dict(FiniteTensors(tensors))


@pytest.mark.parametrize("whose", ["ours", "a user's"])
def test_an_error_in_a_users_function_is_shown_with_its_place(tmp_path, monkeypatch, capsys, whose):
    pytest.importorskip("matplotlib")
    (tmp_path / "their_reward.py").write_text("def reward(row, completion):\n    return int('nine')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def run(config: object, *, resume: bool) -> None:
        if whose == "ours":
            load_config(str(CONFIG), ["run.speed=1"])
        importlib.import_module("their_reward").reward({}, "")

    monkeypatch.setattr(grpo, "run", run)
    assert main([str(CONFIG), f"run.dir={tmp_path}/runs"]) == 2
    said = capsys.readouterr().err
    assert "lockstep: error: " in said
    assert ("their_reward.py" in said and "return int('nine')" in said) is (whose == "a user's")
    assert ("Traceback" in said) is (whose == "a user's")


@pytest.mark.parametrize(("error", "code"), [("KeyError('level')", 1), ("ValueError('no level')", 2)])
def test_the_line_of_an_error_in_a_users_function_has_its_sample(tmp_path, monkeypatch, capsys, error, code):
    pytest.importorskip("matplotlib")
    name = f"raising_reward_{code}"
    (tmp_path / f"{name}.py").write_text(f"def reward(row, completion):\n    raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)

    def run(config: object, *, resume: bool) -> None:
        problem = Problem("2 + 2?", "4", "rows.jsonl:7")
        done = Completion("id", 3, (1,), (2,), "five\nor six", (-0.5,), None, 0, 0, "0", None, ())
        Scorer([f"{name}:reward"])([problem], [done])

    monkeypatch.setattr(grpo, "run", run)
    assert main([str(CONFIG), f"run.dir={tmp_path}/runs"]) == code
    said = capsys.readouterr().err
    where = f"; in reward '{name}:reward', sample 3 of rows.jsonl:7, 'five\\nor six'\n"
    message = "KeyError: 'level'" if code == 1 else "no level"
    assert said.endswith(f"\nlockstep: error: {message}{where}") and f"raise {error}" in said


def test_bad_input_under_torchrun_names_the_key_once_and_hangs_nobody(tmp_path):
    started = time.monotonic()
    assert finish(torchrun(tmp_path, str(CONFIG), "run.speed=1"), 60) != 0
    log = (tmp_path / "log").read_text()
    assert log.count("lockstep: error: unknown key run.speed") == 1
    assert "exitcode  : 2" in log
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_leaves_the_refusal_to_the_first_unless_no_launcher_ends_it(monkeypatch, capsys, comes):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(grpo, "REFUSAL_S", 60 if comes else 0.01)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        if comes:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert main([str(CONFIG), "run.speed=1"]) == 2
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert ("unknown key run.speed" in capsys.readouterr().err) is not comes


@pytest.mark.slow
def test_a_model_with_recurrent_layers_trains_with_a_gap_of_zero(tmp_path):
    settings = ("model.family=qwen3_5", "model.num_layers=4")
    assert finish(torchrun(tmp_path, str(CONFIG), *SHRUNK, *settings)) == 0, (tmp_path / "log").read_text()
    lines = read_metrics(tmp_path / "runs/arithmetic/metrics.jsonl")
    assert [line["logprob_gap"] for line in lines] == [0.0] * 4
    assert all(line["sync_bytes"] == 0 for line in lines)
    assert len({line["weight_digest"] for line in lines}) == 4, "every step changes the weights"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/arithmetic/model")
    assert type(model).__name__ == "Qwen3_5ForCausalLM"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["model.family=qwen3_5"], id="recurrent layers"),
        pytest.param(["train.lora.rank=16", "train.lora.alpha=32", "train.learning_rate=1e-3"], id="adapters"),
    ],
)
def test_ten_steps_of_the_whole_job_raise_the_accuracy(tmp_path, settings):
    """As `make train`, from 35 to 70 % and more in its first ten steps; BENCHMARKS.md has all forty."""
    assert finish(torchrun(tmp_path, str(CONFIG), "run.num_steps=10", *settings), seconds=1500) == 0
    lines = read_metrics(tmp_path / "runs/arithmetic/metrics.jsonl")
    assert [line["logprob_gap"] for line in lines] == [0.0] * 10
    before = re.search(r"held-out mean reward: ([0-9.]+)% before", (tmp_path / "log").read_text())
    assert before is not None and 20 < float(before[1]) < 50
    assert 100 * lines[-1]["eval_reward_mean"] > float(before[1]) + 20
