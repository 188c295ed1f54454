"""A module's parameters and buffers by their Hugging Face names, found without a walk of its tree each time.

An update lists them several times, and a tree has more modules than tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class HostedTensors:
    """The tensors of a module whose tree does not change; the tensors in it may be replaced, and others may come."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = list(module.named_modules(remove_duplicate=False))
        self._released: list[torch.Size] = []  # shapes of the parameters in their order, while they have no memory

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, tied ones once under the first of their names."""
        seen: set[int] = set()
        for name, parameter in self._all_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def buffers(self, *, stored: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, shared ones once under the first of their names. stored: those of checkpoints only."""
        seen: set[int] = set()
        for prefix, owner in self._owners:
            if not owner._buffers:
                continue
            for name, buffer in owner.named_buffers(prefix, recurse=False):
                is_wanted = not stored or name.rpartition(".")[2] not in owner._non_persistent_buffers_set
                if is_wanted and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield name, buffer

    def tied_names(self) -> dict[str, str]:
        """Return the further names of tied parameters, each with its name in `parameters`."""
        first: dict[int, str] = {}
        pairs = self._all_parameters()
        return {name: known for name, p in pairs if (known := first.setdefault(id(p), name)) != name}

    @property
    def are_released(self) -> bool:
        """Whether the parameters have no memory: between `release` and `resume`."""
        return bool(self._released)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters now, tied ones once."""
        return sum(parameter.nbytes for _, parameter in self.parameters())

    def release(self) -> int:
        """Free the parameters' memory and lose their values; returns its bytes, 0 if they have none."""
        if self._released:
            return 0
        before = self.num_bytes
        for _, parameter in self.parameters():
            self._released.append(parameter.shape)
            parameter.data = parameter.data.new_empty(0)
        return before

    def resume(self) -> int:
        """Allocate the released parameters, whose values are undefined until written. Returns the bytes allocated."""
        before = self.num_bytes
        if self._released:
            for (_, parameter), shape in zip(self.parameters(), self._released, strict=True):
                parameter.data = parameter.data.new_empty(shape)
            self._released = []
        return self.num_bytes - before

    def _all_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, owner in self._owners:
            if owner._parameters:
                yield from owner.named_parameters(prefix, recurse=False)


def first_weight(tensors: Iterable[Tensor]) -> Tensor:
    """Return the first tensor of floating-point numbers: its dtype and device are the model's. Without any, the first.

    Parameters of integers, such as counts, say nothing of the operations.
    """
    first: Tensor | None = None
    for tensor in tensors:
        if tensor.is_floating_point():
            return tensor
        first = tensor if first is None else first
    if first is None:
        raise ValueError("the module has no parameters")
    return first
