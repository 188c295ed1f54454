"""The examples of environments: their rows, and a step of each config that needs no package beyond the tests' own."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from lockstep.integration.grpo.results.samples import read_samples
from lockstep.integration.grpo.settings.config import load_config
from lockstep.tests.support import prepared_python
from lockstep.tests.support.chat.tokenizer import VOCAB_SIZE, byte_tokenizer, chat_template
from lockstep.tests.support.random_models import random_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "environments"
ROWS = ROOT / "examples" / "environments/rows.py"
PLAYED_BY_TEST_CLIENTS = "environments/shorter_each_time.py"  # with verifiers, which is not installed here


@pytest.mark.slow
@pytest.mark.parametrize(("package", "file", "options"), [
    pytest.param("textarena", "games", [], marks=pytest.mark.exhaustive),
    ("reasoning_gym", "tasks", ["--name", "basic_arithmetic"]),
])  # fmt: skip
def test_steps_of_episodes_are_the_same_ahead_of_training(tmp_path, package, file, options):
    """Run the example's commands, with a tiny model in place of the real one."""
    prepare(tmp_path)
    run(tmp_path, str(ROWS), package, f"data/{file}.jsonl", *options, "--num", "40")
    lines = [train(tmp_path, package, f"ahead{ahead}", f"rollout.ahead={ahead}") for ahead in (0, 1)]
    digests = [[line["weight_digest"] for line in its] for its in lines]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_an_agent_is_trained_by_its_base_url(tmp_path):
    """Run the example's commands likewise. What the job keeps of the agents can be proven."""
    prepare(tmp_path)
    shutil.copy(ROOT / "examples" / "an_agent.py", tmp_path / "examples")
    run(tmp_path, str(ROWS), "agent", "data/errands.jsonl", "--num", "40")
    lines = train(tmp_path, "agent", "agents", "run.rollouts_every=1")
    assert lines[0]["reward/crashed"] == 0.0 and lines[0]["weight_digest"] != lines[1]["weight_digest"]
    rows = read_samples(tmp_path / "runs" / "agents", 1)
    for row in rows:
        assert row["num_turns"] == 3 and [one["num_turns"] for one in row["conversations"]] == [1]
        assert len(row["receipts"]) == 4 and len(row["logprobs"]) == len(row["token_ids"]) > 0
    done = run(tmp_path, "-m", "lockstep.integration.cli", "replay", "runs/agents", "--step", "1")
    assert "16 of 16 samples proven equal, 0 differ, 0 unproven" in done, done


def prepare(folder):
    """Put the examples and a tiny model into a folder."""
    shutil.copytree(FOLDER, folder / "examples" / "environments")
    model = folder / "data" / "smollm2" / "model"
    random_model("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=2048).save_pretrained(model)
    byte_tokenizer(chat_template("hermes")).save_pretrained(model)


def train(folder, package, name, *more):
    """Train two steps of an example, and return the metrics."""
    settings = [
        "run.num_steps=2", "run.num_ranks=1", "rollout.prompts_per_step=2", "rollout.group_size=2",
        "rollout.max_new_tokens=8", "data.num_heldout=2", f"run.name={name}", *more,
    ]  # fmt: skip
    run(folder, "-m", "lockstep.integration.grpo", f"examples/environments/{package}.toml", *settings)
    text = (folder / "runs" / name / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["logprob_gap"] for line in lines] == [0.0, 0.0]
    return lines


def run(folder, *arguments):
    """Run a program of Python in a folder, and return what it printed."""
    done = prepared_python.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_the_configs_are_those_of_jobs():
    for name in ("agent", "textarena", "reasoning_gym", "verifiers"):
        assert load_config(FOLDER / f"{name}.toml", []).environment == name
    assert (ROOT / "examples" / PLAYED_BY_TEST_CLIENTS).is_file()


def test_rows_of_games_have_seeds():
    rows = list(runpy.run_path(str(ROWS))["rows"]("textarena", "Wordle-v0", 3))
    assert [row["seed"] for row in rows] == [0, 1, 2] and rows[0]["env"] == "Wordle-v0"
