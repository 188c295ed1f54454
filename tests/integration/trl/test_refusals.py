"""Trainers whose samples or log-probabilities the engine cannot share are refused, each setting by its name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.integration.trl.refusals import refuse_unsupported
from lockstep.rollout.config import EngineConfig

SUPPORTED = {
    "use_vllm": False, "use_transformers_continuous_batching": False, "environment_factories": None, "tools": [],
    "is_fsdp_enabled": False, "is_deepspeed_enabled": False,
    "fp16": False, "bf16": False, "cast_lm_head_to_fp32": False, "use_liger_kernel": False, "torch_compile": False,
    "parallelism_config": None,
}  # fmt: skip


def trainer(dtype=torch.float32, model=None, **changes):
    """Return the attributes of a GRPOTrainer that are looked at."""
    its = SUPPORTED | changes
    module = torch.nn.Linear(2, 2, dtype=dtype)
    for name, value in (model or {}).items():
        setattr(module, name, value)
    accelerator = SimpleNamespace(parallelism_config=its["parallelism_config"])
    return SimpleNamespace(**its, model=module, args=SimpleNamespace(**its), accelerator=accelerator)


def test_what_is_supported_passes():
    refuse_unsupported(trainer(), EngineConfig())
    refuse_unsupported(trainer(torch.bfloat16, bf16=True), EngineConfig())
    refuse_unsupported(trainer(model={"hf_device_map": {"": 0}}), EngineConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_vllm": True}, "use_vllm=True"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True"),
        ({"tools": [len]}, "tools: TRL continues"),
        ({"tools": [len], "environment_factories": {}}, "environment_factory: TRL continues"),
        ({"is_fsdp_enabled": True}, "FSDP: "),
        ({"is_deepspeed_enabled": True}, "DeepSpeed: "),
        ({"fp16": True}, "fp16=True"),
        ({"bf16": True}, "bf16=True .* weights in torch.float32"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"model": {"is_loaded_in_4bit": True}}, "a quantized model"),
        ({"model": {"hf_device_map": {"a": 0, "b": 1}}}, "device_map: the model is on 2 devices"),
        (
            {"parallelism_config": SimpleNamespace(tp_enabled=False, cp_enabled=True, sp_enabled=False)},
            "parallelism_config: ",
        ),
    ],
)
def test_each_setting_is_refused_by_its_name(changes, message):
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(trainer(**changes), EngineConfig())


def test_all_faults_are_named_at_once():
    with pytest.raises(ValueError, match=r"use_vllm=True.*fp16=True.*FSDP.*tp=2, pp=1"):
        refuse_unsupported(trainer(use_vllm=True, fp16=True, is_fsdp_enabled=True), EngineConfig(tp=2, k_blocks=2))
