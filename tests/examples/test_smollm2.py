"""The real model of examples/smollm2: its task, and a few steps of the config that trains it."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.tests.support import prepared_python

ROOT = Path(__file__).parents[2]
SENTENCES = ROOT / "examples" / "smollm2/sentences.py"
TWO_TURNS = ROOT / "examples" / "smollm2/two_turns.py"
MODEL = ROOT / "examples" / "smollm2/model.py"
ROW = {"subject": "cat", "least": 4, "largest": 6}


@pytest.mark.parametrize(
    ("completion", "reward", "success"),
    [
        ("The cat sleeps all day.", 1.0, 1.0),
        ("  A mother-in-law's cat sleeps!\n", 1.0, 1.0),  # white space around it; a hyphen joins, an apostrophe too
        ("Cats sleep.", 0.75, 0.0),  # two words too few
        ("The cat sleeps on my old red sofa.", 0.75, 0.0),
        ("The cat " + "very " * 12 + "long.", 0.0, 0.0),  # nine words too many
        ("The cat sleeps all day", 0.0, 0.0),  # no end
        ("A cat. It sleeps.", 0.0, 0.0),
        ("The dog sleeps all day.", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_a_sentence_is_rewarded_by_its_number_of_words(completion, reward, success):
    one_sentence = runpy.run_path(str(SENTENCES))["one_sentence"]
    assert one_sentence(ROW, completion) == {"in_band": reward, "success": success}


def test_the_rows_share_no_subject_and_are_the_same_each_time(tmp_path):
    write = runpy.run_path(str(SENTENCES))["write"]
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        write(folder)
        found.append([(folder / name).read_text() for name in ("train.jsonl", "heldout.jsonl")])
    assert found[0] == found[1]
    train, heldout = ([json.loads(line) for line in text.splitlines()] for text in found[0])
    assert len(train) >= 500 and len(heldout) >= 256
    assert not {row["subject"] for row in train} & {row["subject"] for row in heldout}
    first = heldout[0]
    assert all(str(first[name]) in first["prompt"][0]["content"] for name in ("subject", "least", "largest"))


@pytest.mark.parametrize(
    ("second", "reward", "success"),
    [("The cat sleeps.", 1.0, 1.0), ("The cat sleeps all day.", 0.875, 0.0), ("Still asleep.", 0.5, 0.0)],
)
def test_both_sentences_of_two_turns_are_rewarded(monkeypatch, second, reward, success):
    monkeypatch.syspath_prepend(str(TWO_TURNS.parent))
    asked, answers = [], iter(["The cat sleeps all day.", second])

    class Session:
        async def turn(self, text):
            asked.append(text)
            return SimpleNamespace(text=next(answers))

        def episode(self, value):
            return value

    play = runpy.run_path(str(TWO_TURNS))["say_and_shorten"]
    found = asyncio.run(play(ROW | {"least": 5, "prompt": "?"}, Session()))
    assert found["said"] + found["shortened"] == reward and found["success"] == success
    assert asked[0] == "?" and "at most 3 words" in asked[1]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Make the model's folder and the rows, where the configs look for them, and return the folder to start in."""
    folder = tmp_path_factory.mktemp("smollm2")
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copytree(ROOT / "configs", folder / "configs")
    for program, place in ((MODEL, "data/smollm2/model"), (SENTENCES, "data/smollm2")):
        command = [sys.executable, str(program), place]
        done = prepared_python.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "smollm2_sentences",
        *(pytest.param(f"smollm2_{it}", marks=pytest.mark.exhaustive) for it in ("lora", "two_turns")),
    ],
)
def test_a_few_steps_of_the_real_run(prepared, name):
    shrunk = [
        "run.num_steps=2", "run.eval_every=2", "data.num_heldout=8", "rollout.prompts_per_step=4",
        "rollout.group_size=4", "checkpoints.keep=1",
    ]  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "lockstep.integration.grpo", f"configs/{name}.toml", *shrunk,
    ]  # fmt: skip
    done = prepared_python.run(
        command, cwd=prepared, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (prepared / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["logprob_gap"] for line in lines] == [0.0, 0.0]
    assert len({line["weight_digest"] for line in lines}) == 2
    assert 0.0 < lines[-1]["eval_reward_mean"] < 1.0 and 1.0 < lines[0]["entropy"] < 5.0  # a model that speaks
