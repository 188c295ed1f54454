"""Tensors of a plain or DistributedDataParallel model: every rank holds all of it."""

from __future__ import annotations

import torch
from torch import nn

from ....weight_sync.manifest import NamedTensors
from .cast import Cast
from .named_tensors import outgoing, trained_tensors, unwrapped


def ddp_tensors(model: nn.Module, dtype: torch.dtype | None = None, *, buffers: bool = True) -> NamedTensors:
    """Yield the parameters of a model, and its persistent buffers, under their Hugging Face names, one by one;
    floating-point ones in the dtypes that they have in a model loaded in `dtype`.

    Any rank may iterate, alone and as far as it likes. Without a cast the tensors are the trainer's own storage: they
    change with its next optimizer step.
    """
    model = unwrapped(model)
    cast_to = Cast(model, dtype)
    for name, tensor in trained_tensors(model, buffers=buffers):
        yield name, outgoing(tensor, cast_to.dtype_of(name, tensor))
