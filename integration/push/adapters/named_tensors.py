"""Functions of all trainer adapters: the tensors of a model, their names, and the cast before they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ....weight_sync.manifest import TensorSpec
from .cast import Cast

_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, activation checkpointing


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside any nesting of DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = cast("nn.Module", model.module)
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile's wrapper
            model = cast("nn.Module", model._orig_mod)
        else:
            return model


def trained_tensors(model: nn.Module, *, buffers: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, and with `buffers` the persistent buffers, as the model holds them: shards where it is sharded.
    Such buffers are a part of the model: routers of some families choose experts by them, and trainers write them.

    Names are those of the bare model. A tied tensor comes once, under the name that `named_parameters` gives it.
    """
    yield from ((_bare(name), parameter) for name, parameter in model.named_parameters())
    if buffers:
        # Bare names on both sides: the wrapper of activation checkpointing is in those of buffers alone.
        persistent = {_bare(name) for name in model.state_dict(keep_vars=True)}
        yield from ((name, buffer) for full, buffer in model.named_buffers() if (name := _bare(full)) in persistent)


def outgoing_specs(
    model: nn.Module, dtype: torch.dtype | None = None, *, buffers: bool = True
) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors that an adapter yields for this (unwrapped) model, without gathering them: whole
    shapes, dtypes after the cast."""
    cast_to = Cast(model, dtype)
    return tuple(
        TensorSpec(
            name,
            cast_to.dtype_of(name, tensor),
            tuple(getattr(tensor, "ds_shape", tensor.shape)),  # DeepSpeed's partitioned parameters are empty
        )
        for name, tensor in trained_tensors(model, buffers=buffers)
    )


def outgoing(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor detached, contiguous, and of `dtype`. Copies only where something has to change."""
    return tensor.detach().to(dtype).contiguous()


def _bare(name: str) -> str:
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name
