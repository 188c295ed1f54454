"""Every program in examples/ runs unchanged, on a tiny model, and prints the promised output."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.support import prepared_python

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGEST = "[0-9a-f]{64}"


@pytest.fixture
def run_example(monkeypatch, capsys, restore_threads):
    """Make a function that runs an example and returns its output: run_example("generate.py", "--model", "FOLDER")."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(str(EXAMPLES))  # as Python does for a script's own folder
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        out = capsys.readouterr().out
        return re.sub(r"^\[.*real_accelerator\.py.*\n", "", out, flags=re.MULTILINE)  # DeepSpeed's, when it is imported

    yield run
    sys.modules.pop("tiny_model", None)


def torchrun(folder: Path, *arguments: str, run: Callable = subprocess.run) -> str:
    """Run a program on two ranks and return their output. run: subprocess's, or that of programs that are forked."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run(command, cwd=folder, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_every_example_is_run_by_a_test_of_this_folder():
    programs = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    programs -= {"tiny_model.py", "an_agent.py", "environments/digits.py"}  # parts of others
    named = {name.replace("config.toml", "reward.py") for name in re.findall(r'"([\w/]+\.(?:py|toml))"', SOURCE)}
    assert programs <= named


def test_generate(run_example):
    printed = run_example("generate.py")
    assert len(re.findall(r"^sample \d", printed, re.MULTILINE)) == 4
    assert len(set(re.findall(f"version 1, digest ({DIGEST})", printed))) == 1


def test_generate_with_a_model_of_the_users(run_example, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for part in __import__("tiny_model").load(None):
        part.save_pretrained(tmp_path)
    assert run_example("generate.py", "--model", str(tmp_path)) == run_example("generate.py")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_update(run_example, mode):
    printed = run_example("pause_and_update.py", "--mode", mode)
    assert f"mode='{mode}'" in printed
    for sample in (0, 1):
        spans = re.findall(rf"^sample {sample}, tokens (\d+) to (\d+): version (\d)", printed, re.MULTILINE)
        [(first, end, old), (start, last, new)] = spans
        assert (first, last, old, new) == ("0", "199", "1", "2") and int(start) == int(end) + 1


def test_pin_prefix(run_example):
    printed = run_example("pin_prefix.py")
    assert "without a pin: 0 tokens" in printed and "with a pin: 80 tokens" in printed
    assert "pinned by example" in printed and "unpinned 5 blocks" in printed


def test_json_schema(run_example):
    printed = run_example("json_schema.py")
    lines = re.findall(r"'city': '(?:Paris|Rome|Oslo)', 'nights': [1-9], 'breakfast'.*, 3 of them chosen", printed)
    assert len(lines) == 4


def test_train_an_agent(run_example):
    printed = run_example("train_an_agent.py", "--steps", "2")
    steps = re.findall(r"^step (\d): reward 0\.\d+, (\d+) rows, log-probability gap (\S+)$", printed, re.MULTILINE)
    assert steps == [("1", "16", "0.0"), ("2", "16", "0.0")], printed


def test_serving(run_example):
    printed = run_example("serving.py")
    assert re.search(f"weights: version 1, digest {DIGEST}", printed)
    assert "POST /v1/completions:" in printed and "'completion_tokens': 8" in printed


def test_trl_grpo(run_example, monkeypatch):
    pytest.importorskip("trl", reason="the extra `trl` is not installed: make test-trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    for arguments in (["--steps", "3"], ["--steps", "2", "--lora"]):
        printed = run_example("trl_grpo.py", *arguments)
        steps = re.findall(
            r"^step (\d): reward \S+, log-probability gap (\S+), ratio clipped (\S+)$", printed, re.MULTILINE
        )
        assert [numbers[1:] for numbers in steps] == [("0.0", "0.0")] * int(arguments[1])


@pytest.mark.slow
def test_own_trainer(tmp_path):
    command = [str(EXAMPLES / "own_trainer.py"), "--steps", "3"]
    printed = torchrun(tmp_path, *command, run=prepared_python.run)
    steps = re.findall(r"^step (\d): reward \S+, log-probability gap (\S+), weights (\w+)$", printed, re.MULTILINE)
    assert [(step, gap) for step, gap, _ in steps] == [("1", "0.0"), ("2", "0.0"), ("3", "0.0")]
    assert len({digest for *_, digest in steps}) == 3


@pytest.mark.slow
def test_pictures(tmp_path, run_example):
    pytest.importorskip("PIL.Image")
    needs_transformers(5, 23)
    assert "240 pictures and a model are in" in run_example("pictures/make.py", str(tmp_path))
    for name in ("pictures/config.toml", "pictures/reward.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for row in rows[::2]:  # every other one has no picture, so that a rank may have none in a step
        row |= {"prompt": "what colour ?", "images": []}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["run.num_steps=3", "rollout.prompts_per_step=2", "rollout.group_size=4", "data.num_heldout=4"]
    torchrun(tmp_path, "-m", "lockstep.integration.grpo", "config.toml", *small)
    assert (tmp_path / "runs/pictures/metrics.jsonl").read_text().count('"logprob_gap": 0.0') == 3


@pytest.mark.slow
def test_your_reward(tmp_path):
    shrunk = [
        "run.num_steps=2", "run.eval_every=2", "warm_start.num_steps=12", "warm_start.batch_size=16",
        "data.num_heldout=9", "rollout.prompts_per_step=4", "rollout.group_size=4", "model.num_layers=2",
        "model.hidden_size=64", "engine.kv_cache=4MiB",
    ]  # fmt: skip
    places = [f"run.dir={tmp_path}", f"warm_start.cache_dir={tmp_path / 'cache'}"]
    config = EXAMPLES / "your_reward/config.toml"
    torchrun(config.parent, "-m", "lockstep.integration.grpo", str(config), *shrunk, *places)
    assert (tmp_path / "your_reward" / "metrics.jsonl").read_text().count('"logprob_gap": 0.0') == 2


def test_right_digits_are_counted_from_the_ones():
    right_digits = runpy.run_path(str(EXAMPLES / "your_reward/reward.py"))["right_digits"]
    assert right_digits("", "12 13 06=632", "632") == 1
    assert right_digits("", "12 13 06=532", "632") == pytest.approx(2 / 3)
    assert right_digits("", "12 13 06=622", "632") == pytest.approx(1 / 3)
    assert right_digits("", "=32", "632") == right_digits("", "nothing", "632") == 0


SOURCE = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
