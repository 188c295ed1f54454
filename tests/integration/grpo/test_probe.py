"""Tests of `lockstep probe`: what it finds is what the job's first step finds, and it leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.integration.cli import main as cli
from lockstep.integration.grpo.probe import Probe, advice, probed_config
from lockstep.integration.grpo.settings.config import load_config

CONFIG = str(Path(__file__).parents[3] / "configs" / "arithmetic_cpu.toml")
REWARD = """
import time
def score(row, completion):
    time.sleep(0.002)
    return {'letters': len(completion) % 5 / 4, 'success': len(completion) > 9}
"""
SHRUNK = [
    "warm_start.num_steps=12", "warm_start.batch_size=16", "data.num_heldout=16", "model.num_layers=2",
    "model.hidden_size=64", "engine.kv_cache=4MiB", "reward=letters.py:score", "run.num_steps=60",
    "trainer=fsdp2", "engines=separate", "sync=tensor",
]  # fmt: skip
FOUND = Probe(
    0.25, {"flat_groups": 0.5, "truncated_share": 0.0, "success": 0.5}, [], 100.0, 0.0, 1.0, 0.25, 2.0, 0.5, 2**30, True
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch, restore_threads):
    """A folder to start in, with a reward."""
    (tmp_path / "letters.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_probe_prints_what_a_run_would_begin_with_and_writes_nothing(folder, capsys):
    command = ["probe", CONFIG, "--prompts", "3", "--samples", "4", f"warm_start.cache_dir={folder}/cache", *SHRUNK]
    assert cli.main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["logprob_gap"] == 0.0 and 0 < first["reward_mean"] <= 2 and len(first["examples"]) == 3
    assert set(first["statistics"]) >= {"pass@4", "success", "flat_groups", "truncated_share", "entropy"}
    parts = [first[name] for name in ("generate_s", "reward_s", "train_s", "sync_s")]
    assert first["step_s"] == pytest.approx(sum(parts))
    assert first["reward_s"] > 0.002 * 32 * 16, "of all samples of a step of the job"
    assert first["memory_bytes"] > 1e8 and first["tokens_per_s"] > 0
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    assert f"reward     {first['reward_mean']:.3f} in the mean" in told and "letters 0." in told
    assert f"pass@4 {first['statistics']['pass@4']:.1%}" in told and told.count(">>>") == 3
    assert "60 steps: about" in told and "gap        0.0 between" in told
    assert "s of rewards, " in told
    assert {path.name for path in folder.iterdir()} <= {"letters.py", "cache", "__pycache__"}


def test_a_probe_runs_one_rank_whose_engine_has_the_trainers_module():
    config = load_config(CONFIG, ["trainer=fsdp2", "rollout.ahead=2", "http.port=8000"])
    probed = probed_config(replace(config, run=replace(config.run, num_ranks=8)), 5, 3)
    found = (probed.trainer, probed.engines, probed.sync, probed.run.num_ranks, probed.rollout.ahead, probed.http.port)
    assert found == ("ddp", "local", "in_place", 0, 0, 0)
    assert (probed.rollout.prompts_per_step, probed.rollout.group_size) == (5, 3)
    assert probed.train == config.train and probed.model == config.model


def test_a_probe_runs_what_the_job_runs_also_with_kept_kv_and_more_micro_batches_than_it_has_samples():
    separate = ["engines=separate", "sync=tensor", "rollout.ahead=1", "rollout.on_commit=keep", "rollout.keep_kv=true"]
    config = load_config(CONFIG, [*separate, "train.gradient_accumulation_steps=200"])
    probed = probed_config(config, 5, 3)
    assert not probed.rollout.keep_kv
    assert probed.train.gradient_accumulation_steps == 15


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flat_groups": 1.0}, "no group has spread"),
        ({"flat_groups": 0.75}, "75% of the groups"),
        ({"truncated_share": 0.3}, "30% of the samples were cut off at rollout.max_new_tokens=16"),
        ({"success": 1.0}, "nothing left to learn"),
    ],
)
def test_a_probe_says_what_stands_in_the_way(changes, words):
    config = load_config(CONFIG)
    assert advice(FOUND, config) == []
    [line] = advice(replace(FOUND, statistics=FOUND.statistics | changes), config)
    assert words in line


@pytest.mark.parametrize(
    "settings", [["train.reference=teacher"], ["train.baseline=batch", "train.scale_rewards=none"]]
)
def test_groups_of_equal_rewards_are_no_fault_where_they_teach_all_the_same(settings):
    config = load_config(CONFIG, ["train.kl_coefficient=0.1", *settings])
    assert advice(replace(FOUND, statistics=FOUND.statistics | {"flat_groups": 1.0}), config) == []


def test_a_gap_is_told():
    [line] = advice(replace(FOUND, logprob_gap=0.25), load_config(CONFIG))
    assert "a gap of 0.25" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--samples", "1"], "--samples must be at least 2"),
        (["--prompts", "0"], "--prompts must be at least 1"),
        (["reward=nowhere.py:score"], "there is no file 'nowhere.py'"),
        (["train.lerning_rate=1"], "unknown key train.lerning_rate"),
    ],
)
def test_a_mistake_is_named_in_one_line(folder, capsys, arguments, words):
    assert cli.main(["probe", CONFIG, *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_an_error_of_a_reward_is_shown_with_its_place(folder, tmp_path, capsys):
    (tmp_path / "wrong.py").write_text("def score(row, completion):\n    return int('x')\n")
    command = ["probe", CONFIG, f"warm_start.cache_dir={folder}/cache", *SHRUNK, f"reward={tmp_path}/wrong.py:score"]
    assert cli.main(command) == 2
    *before, last = capsys.readouterr().err.splitlines()
    where = rf"in reward '{tmp_path}/wrong.py:score', sample 0 of 'What is "
    assert last.startswith(f"lockstep: error: invalid literal for int() with base 10: 'x'; {where}")
    assert any("wrong.py" in line and "line 2" in line for line in before)
