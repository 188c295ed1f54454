"""Settings of a GRPOTrainer with which the engine cannot sample with the trainer's module, or not with equal bits."""

from __future__ import annotations

from typing import Any

import torch

from ...rollout.config import EngineConfig


def refuse_unsupported(trainer: Any, config: EngineConfig) -> None:
    """Raise ValueError naming every setting of the trainer or the engine that is not supported."""
    wrong = [*_of_generation(trainer), *_of_numerics(trainer), *_of_wrappers(trainer)]
    if config.tp > 1 or config.pp > 1:
        wrong.append(
            f"EngineConfig: tp={config.tp}, pp={config.pp}: each process has an engine of its own, so both are 1"
        )
    if wrong:
        raise ValueError(f"lockstep cannot sample for this trainer: {'; '.join(wrong)}")


def _of_generation(trainer: Any) -> list[str]:
    wrong = []
    if trainer.use_vllm:
        wrong.append("use_vllm=True: the samples come from this engine, set it to False")
    if trainer.use_transformers_continuous_batching:
        wrong.append("use_transformers_continuous_batching=True: the samples come from this engine, set it to False")
    if trainer.environment_factories is not None:
        wrong.append("environment_factory: TRL continues such rollouts with transformers' own generation")
    elif trainer.tools:
        wrong.append("tools: TRL continues such rollouts with transformers' own generation")
    return wrong


def _of_numerics(trainer: Any) -> list[str]:
    args, wrong = trainer.args, []
    dtype = next(trainer.model.parameters()).dtype
    if args.fp16:
        wrong.append("fp16=True: the engine samples in float32 or bfloat16")
    if args.bf16 and dtype is not torch.bfloat16:
        wrong.append(
            f"bf16=True (TRL's default) would compute in bfloat16 with weights in {dtype}: the engine computes in the "
            "dtype of the weights. Set bf16=False, or load the model in bfloat16"
        )
    if args.cast_lm_head_to_fp32:
        wrong.append("cast_lm_head_to_fp32=True: the engine's last layer has the dtype of the weights")
    if args.use_liger_kernel:
        wrong.append("use_liger_kernel=True: its layers are not the engine's")
    if args.torch_compile:
        wrong.append("torch_compile=True: the engine's numerics run uncompiled")
    model = trainer.model
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        wrong.append("a quantized model: the engine samples in float32 or bfloat16")
    return wrong


def _of_wrappers(trainer: Any) -> list[str]:
    wrong = []
    if trainer.is_fsdp_enabled:
        wrong.append("FSDP: the trainer's module holds only parts of the weights")
    if trainer.is_deepspeed_enabled:
        wrong.append("DeepSpeed: its engine keeps the weights where a module in one process cannot read them")
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.tp_enabled or parallel.cp_enabled or parallel.sp_enabled):
        wrong.append("parallelism_config: the engine runs the module whole, in one process")
    places = set((getattr(trainer.model, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        wrong.append(f"device_map: the model is on {len(places)} devices, and an engine is on one")
    return wrong
