"""DistributedDataParallel as the trainer's backend."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ....weight_sync.manifest import NamedTensors
from ...push.adapters.ddp import ddp_tensors
from .backend import TrainerBackend
from .gradient_sums import GradientSums


class DdpBackend(TrainerBackend):
    """A backend with DistributedDataParallel: every rank has all parameters, gradients and optimizer state.

    Gradients in lower precision are summed and sent in float32, in DDP's buckets while the backward pass goes on.
    """

    shares_storage = True
    talks_in_forward = False
    needs_all_batches = False

    def wrap(self, model: PreTrainedModel) -> None:
        device, has_others = self.ranks.device, self.ranks.num_ranks > 1
        # Not every forward uses each parameter: a batch of text needs no encoder of images, and some models have parts
        # that no text needs. A rank that waited for their gradients would wait for ever.
        self._ddp = DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, find_unused_parameters=has_others
        )
        # Looking for them, DDP would copy the logits, lest they be written into; no code does.
        self._ddp._set_ddp_sink_clone(False)
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified", UserWarning)
        # Ranks have forwards without gradients in numbers of their own, where DDP would send buffers before the next
        # rank waits for them. A language model's buffers are constants, such as rotary frequencies. Set here, because
        # the constructor's argument has another name in newer releases of torch.
        self._ddp.broadcast_buffers = False
        self.model = model
        self.optimizer = self.adamw(model)
        if any(parameter.dtype != torch.float32 for parameter in self._trained().values()):
            # Without annotations: DDP refuses those that are text.
            self._ddp.register_comm_hook(self.optimizer.sums, lambda sums, bucket: _average(sums, bucket))

    def forward(self, **inputs: object) -> Tensor:
        logits: Tensor = self._ddp(**inputs).logits
        return logits

    @property
    def needs_last(self) -> bool:  # type: ignore[override]
        """See `TrainerBackend`: one rank alone sends nothing."""
        return self.ranks.num_ranks > 1

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        # Gradients are sent once, with the last micro-batch.
        return nullcontext() if is_last and self.needs_last else self._ddp.no_sync()

    def named_tensors(self, dtype: torch.dtype | None = None) -> NamedTensors:
        return ddp_tensors(self._ddp, dtype)


def _average(sums: GradientSums, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over all ranks, as DDP's hook. Where the optimizer has sums, the bucket's own values stay."""
    parameters, group = bucket.parameters(), dist.group.WORLD
    if parameters[0].dtype == torch.float32:  # a bucket has one dtype
        assert group is not None  # the job's process group is open
        return allreduce_hook(group, bucket)
    return sums.averaged(parameters, bucket.buffer())
