"""The settings of a run as its checkpoints keep them, by which a resumed run finds those that are others now."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ...failures import FileFailed
from ..settings.config import JobConfig
from .checkpoint import newest_checkpoint, saved_settings

# They change no sample: files, waits and memory.
_WITHOUT_EFFECT = frozenset({
    *("run.name", "run.dir", "run.eval_every", "run.checkpoint_every", "run.tensorboard", "run.wandb"),
    *("run.timeout_s", "run.rollouts_every", "run.rollouts_keep", "warm_start.cache_dir", "engine.kv_cache"),
    *("engine.rank_timeout_s", "rollout.reward_timeout_s", "evaluations"),
})  # fmt: skip
_SECTIONS_WITHOUT_EFFECT = ("checkpoints.", "weights.", "http.")
Changes = dict[str, tuple[object, object]]


def settings_of(config: JobConfig) -> dict[str, object]:
    """Return all settings by their keys, such as "run.seed", with values that JSON has."""
    flat: dict[str, object] = {}
    for name, value in asdict(config).items():
        is_section = hasattr(getattr(config, name), "__dataclass_fields__")
        flat |= {f"{name}.{key}": own for key, own in value.items()} if is_section else {name: value}
    return json.loads(json.dumps(flat, default=str))  # dates of TOML, say, become texts


def changed_settings(config: JobConfig, checkpoint: Path) -> Changes:
    """Return the settings that may change samples and differ from those of a checkpoint: the value there, and now.
    Settings that one of the two does not have are left out. Raises FileFailed."""
    saved, now = saved_settings(checkpoint) or {}, settings_of(config)
    both = saved.keys() & now.keys() - _WITHOUT_EFFECT
    if now["train.schedule"] == "constant":  # no other learning rate depends on the end
        both -= {"run.num_steps"}
    changed = {key: (saved[key], now[key]) for key in sorted(both) if saved[key] != now[key]}
    return {key: pair for key, pair in changed.items() if not key.startswith(_SECTIONS_WITHOUT_EFFECT)}


def other_seed(config: JobConfig) -> list[str]:
    """Return the fault of a run that would be resumed with the seed of another one; none for a damaged checkpoint,
    which is refused when it is loaded."""
    checkpoint = newest_checkpoint(config.folder / "checkpoints")
    changed: Changes = {}
    with suppress(FileFailed):
        changed = changed_settings(config, checkpoint) if checkpoint is not None else {}
    if "run.seed" not in changed:
        return []
    saved, now = changed["run.seed"]
    return [
        f"run.seed={now}, but {checkpoint} is of a run with run.seed={saved}: the rest would be that of another run. "
        f"Resume it with run.seed={saved}, or begin a run of another name"
    ]


def describe(changed: Changes) -> str:
    """Say which settings have changed."""
    return ", ".join(f"{key} was {saved!r} and is {now!r}" for key, (saved, now) in changed.items())
