"""FSDP2 as the trainer's backend."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ....weight_sync.manifest import NamedTensors
from ...push.adapters.fsdp2 import fsdp2_tensors
from .adamw import ShardedMastersAdamW, TrainerAdamW
from .backend import TrainerBackend


class Fsdp2Backend(TrainerBackend):
    """A backend with `fully_shard` of each decoder layer and of the rest: parameters, gradients and AdamW in shards.

    Gradients are reduced in float32. A model in lower precision has float32 masters for its shards, and so float32 sums
    of gradients; forwards gather the masters' roundings. With `low_precision="stochastic"` the shards are in the
    model's dtype: each micro-batch's mean over ranks is rounded to it once, and their sum is in float32.
    """

    shares_storage = False
    talks_in_forward = True

    def wrap(self, model: PreTrainedModel) -> None:
        self.model, self._dtype = model, model.dtype
        self.gathered_dtype = self._dtype
        self._has_masters = model.dtype != torch.float32 and self.settings.low_precision == "masters"
        policy = MixedPrecisionPolicy(
            param_dtype=model.dtype if self._has_masters else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.num_ranks,))
        layers = set(model._no_split_modules or ())  # transformers' list of classes to shard as one unit
        for module in [*(module for module in model.modules() if type(module).__name__ in layers), model]:
            if self._has_masters:  # one unit at a time: the whole model is never there in float32
                _widen(module)
            fully_shard(module, mesh=mesh, mp_policy=policy)
        # Logits are a view of the last matrix product; no code writes into them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        self.optimizer = self.adamw(model)

    def adamw(self, model: nn.Module) -> TrainerAdamW:
        """Make the optimizer of the shards. They are the masters where the model is in lower precision."""
        if self._has_masters:
            return ShardedMastersAdamW(self._trained().values(), self.settings)
        return super().adamw(model)

    def forward(self, **inputs: object) -> Tensor:
        return self.model(**inputs).logits

    def named_tensors(self, dtype: torch.dtype | None = None) -> NamedTensors:
        return fsdp2_tensors(self.model, dtype or self._dtype)

    def save_pretrained(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the model as a folder, in the dtype of `named_tensors`."""
        super().save_pretrained(folder, tensors)
        self.model.config.dtype = self._dtype  # transformers has written that of the masters
        self.model.config.save_pretrained(folder)


def _widen(module: nn.Module) -> None:
    """Change the parameters of a module that are not sharded yet to float32. Buffers and ties stay."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()
