"""FSDP2 as the trainer's backend."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from ....weight_sync.manifest import NamedTensors
from ...push.adapters.fsdp2 import fsdp2_tensors
from .backend import TrainerBackend


class Fsdp2Backend(TrainerBackend):
    """A backend with `fully_shard` of each decoder layer and of the rest: parameters, gradients and AdamW in shards."""

    shares_storage = False
    talks_in_forward = True

    def wrap(self, model: PreTrainedModel) -> None:
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.num_ranks,))
        layers = set(model._no_split_modules or ())  # transformers' list of classes to shard as one unit
        for module in [module for module in model.modules() if type(module).__name__ in layers]:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # Logits are a view of the last matrix product; no code writes into them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        self.model = model
        self.optimizer = self.adamw(model)

    def forward(self, **inputs: object) -> Tensor:
        return self.model(**inputs).logits

    def named_tensors(self, dtype: torch.dtype | None = None) -> NamedTensors:
        return fsdp2_tensors(self.model, dtype)
