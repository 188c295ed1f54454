"""Recurrent states of a hosted module's layers: their shapes, and the slots that one rollout step reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateShape:
    """The shape of one state of one layer for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


StateShapes = Mapping[int, Mapping[str, StateShape]]  # by layer of the whole model, then by name
StateTensors = Mapping[int, Mapping[str, Tensor]]  # as StateShapes: [num_slots, *shape]


@dataclass(frozen=True)
class StepStates:
    """The slots of one step's sequences. A step reads one slot and writes another, so it may run twice."""

    tensors: StateTensors
    reads: Tensor  # int64 [S]: the slot with each sequence's states before its rows; slot 0 holds zeros
    writes: Tensor  # int64 [S]: the slot that gets its states after its rows
