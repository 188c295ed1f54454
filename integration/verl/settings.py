"""verl's settings of a rollout as the command of an engine's server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_NOT_TAKEN = {  # settings that would change what is drawn or hosted, and their values that ask for nothing
    "quantization": (None,),
    "quantization_config_file": (None,),
    "enable_rollout_routing_replay": (False,),
    "ignore_eos": (False,),
    "data_parallel_size": (1,),
    "expert_parallel_size": (1, None),
}


def refuse_settings(config: Any) -> None:
    """Raise NotImplementedError naming settings of verl's RolloutConfig that Lockstep does not have."""
    wrong = [f"{name}={config.get(name)}" for name, plain in _NOT_TAKEN.items() if config.get(name) not in plain]
    if config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout:
        wrong.append("mtp.enable_rollout=True")
    if config.disaggregation.enabled:
        wrong.append("disaggregation.enabled=True")
    if wrong:
        raise NotImplementedError(f"the rollout lockstep does not have {', '.join(wrong)}")


def num_ranks(config: Any) -> int:
    """Number of ranks of one replica."""
    return config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size


def k_blocks_of(model_config: Any) -> int:
    """Number of blocks in which row-parallel layers sum, of the rollout and of the trainer's forward: the setting
    `actor_rollout_ref.model.override_config.lockstep_k_blocks`, 1 without it."""
    return int(getattr(model_config.hf_config, "lockstep_k_blocks", 1))


def serve_command(config: Any, model_config: Any, host: str) -> list[str]:
    """Build the command that serves the model's folder, on a free port of `host`.

    `engine_kwargs.lockstep` may have any engine setting, and `python`: the interpreter of an environment that has
    Lockstep, if it is not verl's own. Its values replace those that follow from verl's settings.
    """
    given = dict((config.get("engine_kwargs") or {}).get("lockstep") or {})
    python = str(given.pop("python", sys.executable))
    engine = {
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "max_model_len": config.max_model_len,
        "prefix_cache": config.enable_prefix_caching,
        "k_blocks": k_blocks_of(model_config),
        "tp": config.tensor_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "seed": config.seed,
        **given,
    }
    ranks = num_ranks(config)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [
        python, *launch, "-m", "lockstep.integration.cli", "serve", "--model", model_config.local_path,
        "--host", host, "--port", "0", "--until-eof", "--engine", *_as_flags(engine),
    ]  # fmt: skip


def _as_flags(settings: Mapping[str, object]) -> Sequence[str]:
    return [
        f"{name}={value if isinstance(value, str) else json.dumps(value, default=dict)}"
        for name, value in settings.items()
        if value is not None
    ]
