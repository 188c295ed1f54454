"""Tensors of a model sharded by `fully_shard` (FSDP2), or by any other plan that leaves DTensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ....weight_sync.manifest import NamedTensors
from .cast import Cast
from .named_tensors import outgoing, trained_tensors, unwrapped


def fsdp2_tensors(model: nn.Module, dtype: torch.dtype | None = None, *, buffers: bool = True) -> NamedTensors:
    """Yield the whole parameters of a sharded model, and its persistent buffers, under their Hugging Face names,
    gathered one by one.

    Every rank must iterate, to the end: each step is a collective. Every rank gets every tensor and may drop it at
    once; one whole tensor exists at a time, beside those that the caller keeps. With mixed precision these are the
    master weights, which the optimizer writes; shards are cast before they are gathered, to the dtypes that
    they have in a model loaded in `dtype`.
    """
    model = unwrapped(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A forward without a backward leaves the root's parameters gathered and in the compute dtype.
            module.reshard()
    cast_to = Cast(model, dtype)
    for name, tensor in trained_tensors(model, buffers=buffers):
        yield name, _whole(outgoing(tensor, cast_to.dtype_of(name, tensor)))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().contiguous() if isinstance(tensor, DTensor) else tensor
