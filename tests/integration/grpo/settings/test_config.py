"""Settings: every fault is reported by its key, all faults at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from lockstep.integration.grpo.settings.config import JobConfig, load_config

CONFIGS = Path(__file__).parents[4] / "configs"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_every_shipped_config_is_valid():
    names = sorted(path.name for path in CONFIGS.glob("*.toml"))
    assert {"arithmetic_cpu.toml", "eight_gpus.toml"} <= set(names)
    for name in names:
        load_config(CONFIGS / name)


def test_overrides_replace_the_files_values_and_keep_their_types(tmp_path):
    path = write(tmp_path, '[run]\nname = "x"\nnum_steps = 3\n')
    config = load_config(path, ["run.num_steps=7", "train.learning_rate=1e-4", "model.path=/some/folder",
                                "warm_start.enabled=false", 'run.name="y"', "rollout.temperature=1"])  # fmt: skip
    assert (config.run.num_steps, config.run.name) == (7, "y")
    assert (config.train.learning_rate, config.rollout.temperature) == (1e-4, 1.0)
    assert (config.model.path, config.warm_start.enabled) == ("/some/folder", False)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ('[run]\nname = "x"\nspeed = 3\n', [], "unknown key run.speed (is it run.seed?)"),
        ('[run]\nname = "x"\n[trian]\nlr = 1\n', [], "unknown key trian (is it train?)"),
        ('[run]\nname = "x"\nzzz = 1\n', [], "unknown key run.zzz"),
        ("[run]\nnum_steps = 3\n", [], "missing key run.name"),
        ("", [], "missing key run.name"),
        ('[run]\nname = "x"\nnum_steps = "many"\n', [], "run.num_steps must be a whole number, not 'many'"),
        ('[run]\nname = "x"\nnum_steps = true\n', [], "run.num_steps must be a whole number, not True"),
        ('[run]\nname = "x"\n', ["train.clip_low=high"], "train.clip_low must be a number, not 'high'"),
        ("run = 3\n", [], "run must be a section, not 3"),
        ('[run]\nname = "x"\n', ["rollout.group_size=1"], "rollout.group_size must be at least 2"),
        (
            '[run]\nname = "x"\n',
            ["rollout.redraw=1", "train.baseline=batch", "train.scale_rewards=none"],
            'rollout.redraw must be 0 with train.baseline="batch"',
        ),
        (
            '[run]\nname = "x"\n',
            ["rollout.redraw=1", "train.kl_in=advantage", "train.kl_coefficient=1"],
            'rollout.redraw must be 0 with train.kl_in="advantage"',
        ),
        (
            '[run]\nname = "x"\n',
            ["train.loss=gspo", "train.kl_in=advantage", "train.kl_coefficient=1"],
            'train.kl_in must be "loss" with train.loss="gspo"',
        ),
        (
            '[run]\nname = "x"\n',
            ["train.minibatches_per_step=3"],
            "rollout.prompts_per_step must divide by train.minibatches_per_step=3",
        ),
        (
            '[run]\nname = "x"\n',
            ["train.truncated_penalty=1", "train.overlong_tokens=16"],
            "train.overlong_tokens must be less than rollout.max_new_tokens=16, not 16",
        ),
        (
            '[run]\nname = "x"\n',
            ["train.minibatches_per_step=32", "train.gradient_accumulation_steps=17"],
            "train.gradient_accumulation_steps must be at most the 16 samples of an optimizer step, not 17",
        ),
        ('[run]\nname = "x"\n', ["num_steps"], "override 'num_steps' is not of the form key=value"),
        ('[run]\nname = "x"\n', ["run.name.deep=1"], "run.name.deep: name is a value, not a section"),
        ('[run]\nname = "x"\n', ["http.port=70000"], "http.port must be from 0 to 65535, not 70000"),
        ('[run]\nname = "x"\n', ["model.path=/m", "warm_start.enabled=true"], "warm_start.enabled must be false with"),
        ('[run]\nname = "x"\n', ["warm_start.enabled=false"], "warm_start.enabled must be true without model.path"),
        ('[run]\nname = "x"\n', ["warm_start.enabled=3"], "warm_start.enabled must be true or false, not 3"),
        ('[run]\nname = "x"\n', ["trainer=pp"], """trainer must be "ddp", "fsdp2" or "deepspeed", not 'pp'"""),
        ('[run]\nname = "x"\n', ["sync=magic"], 'sync must be "in_place", "distributed", "tensor", "disk" or "delta"'),
        ('[run]\nname = "x"\n', ["train.kl_coefficient=nan"], "train.kl_coefficient must be a finite number, not nan"),
        ('[run]\nname = "x"\n', ["train.learning_rate=1e400"], "train.learning_rate must be a finite number, not inf"),
        ('[run]\nname = "x"\n', ["eval.temperature=inf"], "eval.temperature must be a finite number, not inf"),
        ('[run]\nname = "x"\n', ["train.clip_low=nan"], "train.clip_low must be a finite number, not nan"),
        ('[run]\nname = "x"\n', ["train.weight_decay=-1"], "train.weight_decay must not be negative, not -1"),
        (
            '[run]\nname = "x"\n',
            ["rollout.reward_timeout_s=-1"],
            "rollout.reward_timeout_s must not be negative, not -1",
        ),
        ('[run]\nname = "x"\n', ["train.num_warmup_steps=-1"], "train.num_warmup_steps must not be negative, not -1"),
        ('[run]\nname = "x"\n', [f"run.seed={10**20}"], "run.seed must fit into 64 bits, not 1"),
        ('[run]\nname = "x"\n', [f"train.lora.rank={10**20}"], "train.lora.rank must fit into 64 bits, not 1"),
        ('[run]\nname = "x"\n', ["run.timeout_s=9999999999"], "run.timeout_s must be at most 1000000000, not 9"),
        ('[run]\nname = "x"\n', ['run.name="a\\u0000"'], "run.name must not have a NUL character"),
        (
            '[run]\nname = "x"\n',
            ["engine.device=x"],
            """engine.device must be "cpu", "cuda" or "cuda:1", say, not 'x'""",
        ),
        ('[run]\nname = "x"\n', ["engines=far"], """engines must be "local" or "separate", not 'far'"""),
        ('[run]\nname = "x"\n', ["engines=separate"], 'sync must not be "in_place" with engines="separate"'),
        ('[run]\nname = "x"\n', ["deepspeed.zero_stage=4"], "deepspeed.zero_stage must be from 0 to 3, not 4"),
        ('[run]\nname = "x"\n', ["weights.undo=some"], """weights.undo must be "tensors" or "none", not 'some'"""),
        ('[run]\nname = "x"\n', ["weights.timeout_s=0"], "weights.timeout_s must be at least 1"),
        ('[run]\nname = "x"\n', ["weights.bucket_bytes=64 blocks"], "weights.bucket_bytes must be bytes"),
        ('[run]\nname = "x"\n', ["weights.bucket_bytes=lots"], """must be bytes ("512MiB"), not 'lots'"""),
        ("[run\n", [], "is not TOML"),
        (f'[run]\nname = "x"\nseed = {"9" * 5000}\n', [], "is not TOML: Exceeds the limit"),
        (f"run = {'[' * 5000}", [], "is not TOML"),
        ('[run]\nname = "x"\n', [f"run.seed={'9' * 5000}"], "run.seed: Exceeds the limit"),
        ('[run]\nname = "x"\nNUM_STEPS = 1\n', [], "unknown key run.NUM_STEPS (is it run.num_steps?)"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(tmp_path, text, overrides, message):
    with pytest.raises(ValueError) as caught:
        load_config(write(tmp_path, text), overrides)
    assert message in str(caught.value)


def test_a_number_too_large_for_a_float_is_named_by_each_key(tmp_path):
    """Of every setting that takes a number with a point; whole numbers have their own limits."""
    types = {key: kind for key, kind in keys_of(JobConfig) if float in (kind, *get_args(kind))}
    types.pop("reward_weights")  # a table
    for key in types:
        with pytest.raises(ValueError, match=rf"{re.escape(key)} must be a number.*, not 10+\.\.\. \(401 characters\)"):
            load_config(write(tmp_path, '[run]\nname = "x"\n'), [f"{key}={10**400}"])
    assert len(types) > 15
    with pytest.raises(ValueError, match=r"reward_weights must be a table, each of a number, not {'x': 10+\.\.\."):
        load_config(write(tmp_path, '[run]\nname = "x"\n'), [f"reward_weights={{x={10**400}}}"])


def keys_of(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    types = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(types[field.name]):
            yield from keys_of(types[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", types[field.name]


def test_a_misspelled_key_of_each_setting_is_refused_with_the_right_one(tmp_path):
    for key, _ in keys_of(JobConfig):
        section, dot, name = key.rpartition(".")
        wrong, hint = f"{section}{dot}{name}_", rf" \(is it {re.escape(key)}\?"
        with pytest.raises(ValueError, match=rf"unknown key {re.escape(wrong)}{hint}"):
            load_config(write(tmp_path, '[run]\nname = "x"\n'), [f"{wrong}=1"])


def test_a_config_that_is_not_there_but_in_the_package_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read: No such file .*; the package's own is .*eight_gpus.toml"):
        load_config(tmp_path / "configs" / "eight_gpus.toml")


def test_every_way_to_train_and_to_sync_can_be_asked_for(tmp_path):
    text = 'trainer = "deepspeed"\nengines = "separate"\n[run]\nname = "x"\n[deepspeed]\nzero_stage = 3\n'
    path = write(tmp_path, text)
    for sync in ("distributed", "tensor", "disk", "delta"):
        config = load_config(path, [f"sync={sync}", "weights.bucket_bytes=1.5MiB", "weights.undo=none"])
        assert (config.trainer, config.sync, config.engines, config.deepspeed.zero_stage) == (
            "deepspeed", sync, "separate", 3
        )  # fmt: skip
        assert config.weights.num_bucket_bytes == 3 << 19
    for trainer in ("ddp", "fsdp2", "deepspeed"):
        assert load_config(path, [f"trainer={trainer}", "engines=local"]).sync == "in_place"


def test_with_adapters_all_that_divides_or_moves_the_weights_is_refused_by_name(tmp_path):
    path = write(tmp_path, '[run]\nname = "x"\n[train.lora]\nrank = 4\n')
    assert load_config(path, ["run.num_ranks=4"]).train.lora.rank == 4
    others = ["trainer=fsdp2", "sync=delta", "engines=separate", "parallel.tp=2", "parallel.pp=2", "engine.k_blocks=2"]
    with pytest.raises(ValueError) as refusal:
        load_config(path, others)
    words = [f'{key} must be "{value}", not' for key, value in
             (("trainer", "ddp"), ("sync", "in_place"), ("engines", "local"))]  # fmt: skip
    words += [f"{key} must be 1, not 2" for key in ("parallel.tp", "parallel.pp", "engine.k_blocks")]
    assert all(word in str(refusal.value) for word in words)


def test_a_model_of_its_own_needs_no_word_about_the_warm_start(tmp_path):
    path = write(tmp_path, '[run]\nname = "x"\n[warm_start]\nnum_steps = 7\n')
    own = load_config(path, ["model.path=/m"])
    explicit = load_config(path, ["model.path=/m", "warm_start.enabled=false"])
    assert own.warm_start.enabled is False and explicit == own
    built = load_config(path)
    assert built.warm_start.enabled is True and built == load_config(path, ["warm_start.enabled=true"])
    assert built.warm_start.num_steps == own.warm_start.num_steps == 7


def test_all_faults_are_named_at_once(tmp_path):
    path = write(tmp_path, "[run]\nnum_steps = 1.5\nspeed = 3\n[engine]\nkv_cach = 1\n")
    with pytest.raises(ValueError) as caught:
        load_config(path)
    for part in ("unknown key run.speed", "missing key run.name", "run.num_steps must", "unknown key engine.kv_cach"):
        assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml.*No such file"):
        load_config(tmp_path / "nowhere.toml")
