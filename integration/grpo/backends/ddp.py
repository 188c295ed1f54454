"""DistributedDataParallel as the trainer's backend."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ....weight_sync.manifest import NamedTensors
from ...push.adapters.ddp import ddp_tensors
from .backend import TrainerBackend


class DdpBackend(TrainerBackend):
    """A backend with DistributedDataParallel: every rank has all parameters, gradients and optimizer state."""

    shares_storage = True
    talks_in_forward = False
    needs_all_batches = False

    def wrap(self, model: PreTrainedModel) -> None:
        device = self.ranks.device
        self._ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        self.model = model
        self.optimizer = self.adamw(model)

    def forward(self, **inputs: object) -> Tensor:
        return self._ddp(**inputs).logits

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self._ddp.no_sync()  # gradients are sent once, with the last micro-batch

    def named_tensors(self, dtype: torch.dtype | None = None) -> NamedTensors:
        return ddp_tensors(self._ddp, dtype)
