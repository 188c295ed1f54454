"""The dtypes, devices and shapes of a borrowed module's parameters: its engine's KV and operations were chosen for
them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .given_module import class_of_memory, listed
from .tensors import HostedTensors

Form = tuple[torch.dtype, torch.device, str, torch.Size]  # the third: how it lies in memory, empty where plainly


class WeightForms:
    """The forms of a borrowed module's parameters, on which its engine's KV, operations and vocabulary depend."""

    def __init__(self, module: nn.Module) -> None:
        """Note the parameters' forms as they are now."""
        self._kind = type(module).__name__
        self._tensors = HostedTensors(module)
        self._forms: dict[str, Form] = {}
        self._forms = dict(self._now())

    def refuse_others(self) -> None:
        """Raise ValueError that names parameters which are of another dtype, device or shape, sharded or quantised,
        since then.

        Parameters that have come or gone count for nothing: tying and untying embeddings is allowed. Nor does the shape
        of one without memory.
        """
        forms = self._forms
        if changed := [(name, form) for name, form in self._now() if forms.get(name, form) != form]:
            first, form = changed[0]
            raise ValueError(
                f"the parameters of {self._kind} are not as when they were hosted: {listed([n for n, _ in changed])} "
                f"(the first is {_described(form)} and was {_described(forms[first])}). Cast, move, resize or shard "
                "the module before the engine is made, or make the engine anew"
            )

    def _now(self) -> Iterator[tuple[str, Form]]:
        for name, tensor in self._tensors.parameters():
            is_sharded = isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")
            memory = "sharded" if is_sharded else class_of_memory(tensor)
            known = self._forms.get(name)
            shape = tensor.shape if known is None or tensor.numel() else known[3]
            yield name, (tensor.dtype, tensor.device, memory, shape)


def _described(form: Form) -> str:
    dtype, device, memory, shape = form
    return f"{dtype} {list(shape)} on {device}{' and ' * bool(memory)}{memory}"
