"""Settings that have no effect with the others of a config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass

from .config import JobConfig

_SHAPE = ("family", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
_WARM_START = ("cache_dir", "num_steps", "batch_size", "learning_rate", "slip_rate")
_FIELDS = ("prompt_field", "answer_field", "images_field")
Rule = tuple[bool, str, str]  # whether keys are not read, the keys, and the reason


def unread_settings(config: JobConfig) -> list[str]:
    """Name the settings that differ from their defaults and that nothing reads, each with its value and the reason."""
    reasons: dict[str, str] = {}
    for is_unread, keys, why in (*_of_data(config), *_of_training(config), *_of_engines(config)):
        if is_unread:
            reasons |= dict.fromkeys(keys.split(), why)
    changed = _changed(config)
    return [f"{key}={changed[key]} ({why})" for key, why in reasons.items() if key in changed]


def _of_data(config: JobConfig) -> Iterator[Rule]:
    model = bool(config.model.path)
    yield model, " ".join(f"model.{name}" for name in _SHAPE), "model.path is set"
    yield model, " ".join(f"warm_start.{name}" for name in _WARM_START), "model.path is set"
    yield config.data.has_rows, "data.min_digits data.max_digits", "problems are not generated sums"
    yield not (config.data.has_rows or config.evaluations), "data.too_long", "problems are generated sums"
    names = " ".join(f"data.{name}" for name in _FIELDS)
    yield not config.data_files, names, "data.path is not set"
    yield not config.checkpoints.best, "checkpoints.best_by", "checkpoints.best is false"
    yield not config.run.rollouts_every, "run.rollouts_keep", "run.rollouts_every is 0"


def _of_training(config: JobConfig) -> Iterator[Rule]:
    train, rollout = config.train, config.rollout
    yield config.trainer != "deepspeed", "deepspeed.zero_stage", f'trainer is "{config.trainer}"'
    yield not train.lora.rank, "train.lora.alpha train.lora.targets", "train.lora.rank is 0"
    yield train.schedule == "constant", "train.final_share", 'train.schedule is "constant"'
    yield config.model.dtype == "float32", "train.low_precision", 'model.dtype is "float32"'
    yield bool(train.lora.rank), "train.low_precision", "adapters are in float32"
    yield not train.kl_coefficient, "train.kl_in train.reference", "train.kl_coefficient is 0"
    bounds = "train.importance_bound train.sequence_bound"
    yield not config.depends_on_timing, bounds, "no token is of older weights"
    yield rollout.on_commit == "verify", "rollout.max_lag", 'rollout.on_commit is "verify"'
    yield not rollout.ahead, "rollout.on_commit rollout.max_lag rollout.keep_kv", "rollout.ahead is 0"


def _of_engines(config: JobConfig) -> Iterator[Rule]:
    parallel, sync = config.parallel, config.sync
    is_aliased = sync == "in_place" and parallel.num_ranks == 1 and config.trainer == "ddp"
    yield is_aliased, "weights.undo", "no weights move"
    yield sync == "in_place", "weights.verify weights.timeout_s", 'sync is "in_place"'
    yield sync in ("in_place", "disk"), "weights.bucket_bytes", f'sync is "{sync}"'
    yield sync != "disk", "weights.folder", f'sync is "{sync}"'
    yield parallel.num_ranks == 1, "engine.rank_timeout_s", "engines have one rank each"
    yield parallel.pp == 1, "engine.sequence_pipelining", "parallel.pp is 1"


def _changed(config: JobConfig) -> dict[str, str]:
    """Return the settings that differ from their defaults, by their keys, as they are written."""
    return dict(_differing(config, ""))


def _differing(section: object, prefix: str) -> Iterator[tuple[str, str]]:
    for one in fields(section):  # type: ignore[arg-type]  # a dataclass
        value = getattr(section, one.name)
        if is_dataclass(value):
            yield from _differing(value, f"{prefix}{one.name}.")
            continue
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if value != default:
            yield f"{prefix}{one.name}", json.dumps(value, default=str)
