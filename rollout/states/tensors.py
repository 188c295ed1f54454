"""The tensors of the state pool and their size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OutOfMemory
from ..model.memory import is_out_of_memory
from ..model.recurrent.states import StateShapes, StepStates


@dataclass(frozen=True)
class StatePlan:
    """The size of a state pool. Without recurrent layers in the whole model all numbers are 0."""

    num_sequences: int = 0  # that may run at a time: each has two slots
    num_snapshots: int = 0
    bytes_per_slot: int = 0  # on this rank

    @property
    def num_slots(self) -> int:
        """Number of slots, with the one for zeros; 0 without recurrent layers."""
        return 1 + 2 * self.num_sequences + self.num_snapshots if self.num_sequences else 0

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot


def plan_state_pool(shapes: StateShapes, max_num_seqs: int, snapshots: int | None, num_bytes: int | None) -> StatePlan:
    """Compute the size of the pool of a module with recurrent layers.

    snapshots: their number; None: as many as sequences. num_bytes: the most that the pool may take; None: no limit.
    Where it is too little for `max_num_seqs`, fewer sequences run at a time. Raises ValueError if it is too little for
    one.
    """
    per_slot = sum(state.num_bytes for layer in shapes.values() for state in layer.values())
    num_sequences = max_num_seqs
    if num_bytes is not None and per_slot:
        num_slots = num_bytes // per_slot - 1
        most = num_slots // 3 if snapshots is None else (num_slots - snapshots) // 2
        if most < 1:
            raise ValueError(
                f"{num_bytes / 2**20:.1f} MiB have no room for the recurrent states of one sequence, "
                f"{per_slot / 2**20:.1f} MiB a slot: free memory, or set fewer state_snapshots"
            )
        num_sequences = min(max_num_seqs, most)
    return StatePlan(num_sequences, num_sequences if snapshots is None else snapshots, per_slot)


class StatePool:
    """One tensor [num_slots, *shape] per recurrent layer of this rank and state. Empty without recurrent layers.

    A page of memory is used only after its first write, so a large pool costs nothing until then.
    """

    def __init__(self, plan: StatePlan, shapes: StateShapes, device: torch.device) -> None:
        self._plan, self._shapes, self._device = plan, shapes, device
        self.tensors: dict[int, dict[str, Tensor]] = {}
        self.allocate()

    @property
    def is_used(self) -> bool:
        """Whether the model has recurrent layers, on this rank or another."""
        return self._plan.num_slots > 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.all())

    def all(self) -> list[Tensor]:
        """Return the tensors in the order of their layers."""
        return [tensor for layer in self.tensors.values() for tensor in layer.values()]

    def step(self, slots: Tensor | None) -> StepStates | None:
        """Return the states of a step. slots: int64 [2, S], those that it reads and those that it writes."""
        return None if slots is None else StepStates(self.tensors, slots[0], slots[1])

    def allocate(self) -> None:
        """Create the tensors. Does nothing when they exist. Raises OutOfMemory; then none exists."""
        if self.tensors:
            return
        tensors: dict[int, dict[str, Tensor]] = {}
        try:
            for layer, states in self._shapes.items():
                tensors[layer] = {
                    name: torch.empty(self._plan.num_slots, *state.shape, dtype=state.dtype, device=self._device)
                    for name, state in states.items()
                }
                for tensor in tensors[layer].values():
                    tensor[0].zero_()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"the state pool of {self._plan.num_slots} slots, {self._plan.num_bytes / 2**20:.1f} MiB, cannot be "
                f"allocated on {self._device}: free memory and try again, or set a smaller EngineConfig.max_num_seqs"
            ) from error
        self.tensors = tensors

    def release(self) -> None:
        """Drop the tensors. Their memory stays until the last reader drops them too."""
        self.tensors = {}
