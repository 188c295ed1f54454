"""Pools of KV and states for steps outside the engine's loop, and trials of a module's code over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.attention.paged import PagedStep
from ..layer_probe import KVShape
from ..memory import is_out_of_memory
from ..recurrent.states import StateShapes, StepStates
from .context import StepContext

TRIAL_ROWS = 8
# Errors that code of another form than a short way expects raises in a trial.
_UNLIKE = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)

Pools = tuple[list[Tensor], list[Tensor], list[Tensor], dict[int, dict[str, Tensor]]]


def step_pools(
    kv_shapes: Sequence[KVShape], states: StateShapes, num_blocks: int, block_size: int, num_slots: int,
    device: torch.device,
) -> Pools:  # fmt: skip
    """Allocate zeros: keys and values per layer [num_blocks, block_size, heads, dim], keys of indexers
    [num_blocks, block_size, dim], and states by layer and name [num_slots, *shape]."""

    def rows(shape: KVShape, width: int) -> Tensor:
        return torch.zeros(num_blocks, block_size, shape.num_kv_heads, width, dtype=shape.dtype, device=device)

    keys = [rows(shape, shape.key_dim) for shape in kv_shapes]
    values = [rows(shape, shape.value_dim) for shape in kv_shapes]
    index_keys = [
        torch.zeros(num_blocks, block_size, shape.index_dim, dtype=shape.index_dtype, device=device)
        for shape in kv_shapes
    ]
    slots = {
        layer: {name: torch.zeros(num_slots, *s.shape, dtype=s.dtype, device=device) for name, s in named.items()}
        for layer, named in states.items()
    }
    return keys, values, index_keys, slots


class Hosted(Protocol):
    """A hosted model, as a trial step needs it."""

    kv_shapes: list[KVShape]
    state_shapes: StateShapes

    @property
    def device(self) -> torch.device: ...
    @property
    def vocab_size(self) -> int: ...


def trial_step(hosted: Hosted) -> tuple[Tensor, Tensor, StepContext]:
    """Return token ids and positions int64 [TRIAL_ROWS] of a sequence, and its step over pools of its own."""
    device = hosted.device
    positions = torch.arange(TRIAL_ROWS, device=device)
    keys, values, index_keys, slots = step_pools(hosted.kv_shapes, hosted.state_shapes, 1, TRIAL_ROWS, 2, device)
    num_rows = torch.tensor([TRIAL_ROWS], dtype=torch.int32, device=device)
    paged = PagedStep(torch.zeros_like(num_rows)[None], torch.cat([torch.zeros_like(num_rows), num_rows]), num_rows)
    places = torch.tensor([[0], [1]], device=device)
    states = StepStates(slots, *places) if slots else None
    step = StepContext(positions, paged, keys, values, states=states, index_caches=index_keys)
    return positions % hosted.vocab_size, positions, step


def has_bits_of(short: Callable[[], Tensor], whole: Callable[[], Tensor]) -> bool:
    """Return whether a module's code gives the same bits in a short way as in a whole step.

    Code of another form, for which the short way raises an error, does not. Too little memory is raised.
    """
    with torch.inference_mode():
        try:
            found = short()
        except _UNLIKE as error:
            if is_out_of_memory(error):
                raise
            return False
        return torch.equal(found, whole())
