"""The entry to the trainer adapters: choose the adapter of a model by its wrapper."""

from __future__ import annotations

import sys
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ....rollout.model.given_module import class_of_memory, listed
from ....weight_sync.manifest import NamedTensors, TensorSpec
from .ddp import ddp_tensors
from .deepspeed import ZeroEngine, zero_tensors
from .fsdp2 import fsdp2_tensors
from .named_tensors import outgoing_specs, unwrapped


def trainer_tensors(model: nn.Module, dtype: torch.dtype | None = None, *, buffers: bool = True) -> NamedTensors:
    """Return the tensors of a trainer's model under their Hugging Face names. Each adapter documents which ranks must
    iterate.

    Takes a transformers model that is plain, in DistributedDataParallel, compiled, sharded by `fully_shard` or another
    DTensor plan, or in a DeepSpeed engine. Raises ValueError, at once, naming the type of anything else, and quantised
    weights.
    """
    if _is_deepspeed_engine(model):
        _refuse_foreign(unwrapped(model.module))
        return zero_tensors(model, dtype, buffers=buffers)
    inner = unwrapped(model)
    _refuse_foreign(inner)
    if any(hasattr(parameter, "ds_id") for parameter in inner.parameters()):
        raise ValueError("the model is partitioned by DeepSpeed: pass the engine that deepspeed.initialize returned")
    is_sharded = any(isinstance(module, FSDPModule) for module in inner.modules())
    if is_sharded or any(isinstance(parameter, DTensor) for parameter in inner.parameters()):
        return fsdp2_tensors(inner, dtype, buffers=buffers)
    return ddp_tensors(inner, dtype, buffers=buffers)


def trainer_specs(
    model: nn.Module, dtype: torch.dtype | None = None, *, buffers: bool = True
) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors that `trainer_tensors` yields, in its order. Any rank may call it alone."""
    inner = unwrapped(model.module if _is_deepspeed_engine(model) else model)
    return outgoing_specs(inner, dtype, buffers=buffers)


def _is_deepspeed_engine(model: nn.Module) -> TypeGuard[ZeroEngine]:
    deepspeed = sys.modules.get("deepspeed")  # an engine cannot exist before its library was imported
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def _refuse_foreign(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise ValueError(
            f"{kind} is neither a transformers model nor a known wrapper of one: DistributedDataParallel, "
            "torch.compile, fully_shard, DeepSpeedEngine"
        )
    wrong = [
        f"{name} ({kind or str(parameter.dtype)})"
        for name, parameter in model.named_parameters()
        if (kind := class_of_memory(_local(parameter))) or parameter.element_size() == 1
    ]
    if wrong:
        raise ValueError(
            f"{type(model).__name__} has quantised weights, or others whose bytes are not their numbers: "
            f"{listed(wrong)}. Engines take plain tensors: train plain weights, or send dequantised ones with "
            "WeightPusher.push_tensors"
        )


def _local(parameter: Tensor) -> Tensor:
    """Return the shard of a parameter on this rank, or the parameter where it is whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
