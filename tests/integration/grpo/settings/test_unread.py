"""Settings that have no effect with the others are named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lockstep.integration.grpo.main import main
from lockstep.integration.grpo.planning.description import describe_plan
from lockstep.integration.grpo.settings.config import JobConfig, load_config
from lockstep.integration.grpo.settings.unread import unread_settings

CONFIGS = sorted((Path(__file__).parents[4] / "configs").glob("*.toml"))
OF_THE_BUILT_MODEL = "model.hidden_size=256 warm_start.num_steps=7 data.min_digits=2"


def job_config(tmp_path: Path, overrides: str) -> JobConfig:
    (tmp_path / "job.toml").write_text('[run]\nname = "x"\n')
    return load_config(tmp_path / "job.toml", overrides.split())


@pytest.mark.parametrize(
    ("given", "with_these", "read_with"),
    [
        ("deepspeed.zero_stage=3", "", "trainer=deepspeed"),
        ("rollout.on_commit=keep rollout.max_lag=4", "", "rollout.ahead=1"),
        ("rollout.max_lag=4", "rollout.ahead=1", "rollout.ahead=1 rollout.on_commit=drop"),
        ("train.importance_bound=3.0 train.sequence_bound=2.0", "", "rollout.ahead=1 rollout.on_commit=keep"),
        (OF_THE_BUILT_MODEL, "model.path=there data.path=rows.jsonl", ""),
        ("data.prompt_field=question", "", "data.path=rows.jsonl"),
        ("weights.undo=none", "", "sync=tensor"),
        ("weights.undo=none", "train.lora.rank=4", "trainer=fsdp2"),
        ("weights.undo=none", "", "parallel.tp=2 engine.k_blocks=2"),
        ("weights.verify=false weights.timeout_s=9", "trainer=fsdp2", "sync=disk"),
        ("weights.bucket_bytes=1MiB", "sync=disk", "sync=delta"),
        ("weights.folder=there", "sync=tensor", "sync=disk"),
        ("train.lora.alpha=8 train.lora.targets=q_proj", "", "train.lora.rank=4"),
        ("train.final_share=0.1", "", "train.schedule=cosine"),
        ("train.low_precision=stochastic", "", "model.dtype=bfloat16"),
        ("run.rollouts_keep=3", "run.rollouts_every=0", ""),
        ("engine.rank_timeout_s=9", "", "parallel.tp=2 engine.k_blocks=2"),
        ("engine.sequence_pipelining=false", "parallel.tp=2 engine.k_blocks=2", "parallel.pp=2"),
    ],
)
def test_settings_that_are_not_read_with_the_others_are_named(tmp_path, given, with_these, read_with):
    names = [one.partition("=")[0] for one in given.split()]
    found = " ".join(unread_settings(job_config(tmp_path, f"{given} {with_these}")))
    assert all(f"{name}=" in found for name in names), found
    found = " ".join(unread_settings(job_config(tmp_path, f"{given} {read_with}"))) if read_with else ""
    assert not any(f"{name}=" in found for name in names), found


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_all_settings_of_our_configs_are_read(path):
    assert unread_settings(load_config(path)) == []


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [("train.learning_rate=2e-5", True), ("train.learning_rate=1e-5", False),
     ("train.learning_rate=2e-5 train.lora.rank=4", False)],
)  # fmt: skip
def test_the_plan_warns_of_a_learning_rate_that_is_large_for_all_weights(tmp_path, make_model, overrides, warns):
    make_model("qwen2").save_pretrained(tmp_path / "model")
    config = job_config(tmp_path, f"model.path={tmp_path / 'model'} {overrides}")
    assert ("warning    train.learning_rate=2e-05" in describe_plan(config, 1)) is warns
    assert "train.learning_rate=" not in describe_plan(job_config(tmp_path, "train.learning_rate=1e-3"), 1)


def test_the_config_for_a_users_own_model_has_no_value_of_a_toy():
    config = load_config(next(path for path in CONFIGS if path.stem == "your_model"))
    assert config.train.learning_rate == 1e-6 and not config.train.kl_coefficient
    assert config.model.dtype == "bfloat16" and config.rollout.max_new_tokens >= 512


def test_defaults_are_not_named(tmp_path):
    assert unread_settings(job_config(tmp_path, "deepspeed.zero_stage=2 weights.undo=tensors")) == []


def test_the_plan_and_the_log_of_a_start_name_them_with_the_reason(tmp_path, caplog, monkeypatch):
    config = job_config(tmp_path, "deepspeed.zero_stage=3")
    named = 'deepspeed.zero_stage=3 (trainer is "ddp")'
    assert f"not read   {named}" in describe_plan(config, 1).splitlines()
    monkeypatch.setattr("lockstep.integration.grpo.main._run", lambda *_args, **_named: 0)
    with caplog.at_level(logging.WARNING):
        assert main([str(tmp_path / "job.toml"), "deepspeed.zero_stage=3", f"run.dir={tmp_path}"]) == 0
    assert f"settings that are not read: {named}" in caplog.text
