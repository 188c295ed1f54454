"""Tensors of a model trained by a DeepSpeed engine, ZeRO stages 0 to 3. DeepSpeed is imported only where it is used."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ....weight_sync.manifest import NamedTensors
from .cast import Cast
from .named_tensors import outgoing, trained_tensors, unwrapped

DEFAULT_GROUP_BYTES = 64 << 20


class ZeroEngine(Protocol):
    """The part of a `deepspeed.DeepSpeedEngine` that is used here."""

    module: nn.Module

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""


def zero_tensors(
    model_engine: ZeroEngine,
    dtype: torch.dtype | None = None,
    *,
    buffers: bool = True,
    group_bytes: int = DEFAULT_GROUP_BYTES,
) -> NamedTensors:
    """Yield the whole parameters of a DeepSpeed engine's model, and its persistent buffers, under their Hugging Face
    names; floating-point ones in the dtypes that they have in a model loaded in `dtype`.

    Stages 0 to 2: every rank holds them all, any rank may iterate alone, and without a cast they are the trainer's own
    storage. Stage 3: every rank must iterate, to the end; parameters are gathered in groups of at most `group_bytes`
    (one larger parameter makes a group of its own), and a rank may drop each tensor at once. With bf16 or fp16 training
    these are the model's weights, which the forward uses, not the optimizer's float32 copies.
    """
    model = unwrapped(model_engine.module)
    cast_to = Cast(model, dtype)
    tensors = list(trained_tensors(model, buffers=buffers))
    if model_engine.zero_optimization_stage() < 3:
        yield from ((name, outgoing(tensor, cast_to.dtype_of(name, tensor))) for name, tensor in tensors)
        return
    sizes = [getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size() for _, tensor in tensors]
    for start, stop in _groups(sizes, group_bytes):
        gathered = _gathered([tensor for _, tensor in tensors[start:stop]])
        for name, tensor in tensors[start:stop]:
            # Removed from the list, so that only one cast copy exists at a time.
            yield name, outgoing(gathered.pop(0), cast_to.dtype_of(name, tensor))


def prepare_deepspeed(config: Mapping[str, object] | None = None) -> dict[str, object]:
    """Keep DeepSpeed from compiling C++ on a machine without an accelerator: that takes half a minute to two minutes
    for each extension, and fails where there is no compiler. Call it before `deepspeed.init_distributed` and
    `deepspeed.initialize`.

    Switches off the shared-memory collectives in this process. Returns a copy of the DeepSpeed config in which Adam or
    AdamW, if it has one without an explicit choice, is torch's own (`torch_adam`). With an accelerator nothing changes.
    """
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    prepared = copy.deepcopy(dict(config or {}))
    if get_accelerator().device_name() != "cpu":
        return prepared
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer = prepared.get("optimizer")
    if isinstance(optimizer, dict) and str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
    return prepared


def _gathered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gather whole parameters from partitioned ones. The engine frees its gathered parameters by dropping its
    reference, so ours stay valid."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]):
        return [tensor.detach() for tensor in tensors]


def _groups(sizes: Sequence[int], budget: int) -> Iterator[tuple[int, int]]:
    """Return start and stop of runs whose sizes add up to at most `budget`; a larger one is a run of its own."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > budget:
            yield start, index
            start, total = index, 0
        total += size
    if sizes:
        yield start, len(sizes)
