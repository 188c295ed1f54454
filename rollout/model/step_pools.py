"""Pools of KV and states for steps outside the engine's loop: of a trial, and of the check."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .layer_probe import KVShape
from .recurrent.states import StateShapes

Pools = tuple[list[Tensor], list[Tensor], dict[int, dict[str, Tensor]]]


def step_pools(
    kv_shapes: Sequence[KVShape], states: StateShapes, num_blocks: int, block_size: int, num_slots: int,
    device: torch.device,
) -> Pools:  # fmt: skip
    """Allocate zeros: keys and values per layer [num_blocks, block_size, heads, dim], and states by layer and name
    [num_slots, *shape]."""

    def rows(shape: KVShape, width: int) -> Tensor:
        return torch.zeros(num_blocks, block_size, shape.num_kv_heads, width, dtype=shape.dtype, device=device)

    keys = [rows(shape, shape.key_dim) for shape in kv_shapes]
    values = [rows(shape, shape.value_dim) for shape in kv_shapes]
    slots = {
        layer: {name: torch.zeros(num_slots, *s.shape, dtype=s.dtype, device=device) for name, s in named.items()}
        for layer, named in states.items()
    }
    return keys, values, slots
