"""DeepSpeed as the trainer's backend. DeepSpeed is imported only by the functions that use it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ....weight_sync.manifest import NamedTensors
from ...push.adapters.deepspeed import prepare_deepspeed, zero_tensors
from ...ranks import Ranks
from ..settings.training import TrainSettings
from .adamw import adamw_options
from .backend import (
    GatheredState,
    Gathering,
    TrainerBackend,
    TrainerState,
    by_size,
    clip,
    gradients_of,
    refuse_other_model,
    scale_gradients,
)

_MAX_COMM_ELEMENTS = 50_000_000  # elements of one collective; DeepSpeed's default keeps buffers of 2 GB


class DeepSpeedBackend(TrainerBackend):
    """A backend with a DeepSpeed engine, ZeRO stages 0 to 3. With bfloat16 parameters, unlike the other backends, it
    keeps float32 copies in partitions of its own."""

    def __init__(self, settings: TrainSettings, ranks: Ranks, zero_stage: int) -> None:
        super().__init__(settings, ranks)
        self.zero_stage = zero_stage
        self.shares_storage = zero_stage < 3
        self.talks_in_forward = zero_stage >= 2

    def wrap(self, model: PreTrainedModel) -> None:
        # DeepSpeed reads this variable at its first import; without it the import searches for accelerators and logs
        # the search.
        os.environ.setdefault("DS_ACCELERATOR", self.ranks.device.type)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed needs it, also in a process without a launcher
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # DeepSpeed calls collectives by torch's old names, and torch would warn at every step.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        config = prepare_deepspeed(self._engine_config(model))
        backend = "nccl" if self.ranks.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # ZeRO takes no class derived from it.
        basic = torch.optim.AdamW(trained, **adamw_options(self.settings, self.ranks.device))
        self._engine, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=basic, config=config)
        self.model = model

    def _engine_config(self, model: PreTrainedModel) -> dict[str, object]:
        num_elements = min(sum(parameter.numel() for parameter in model.parameters()), _MAX_COMM_ELEMENTS)
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # `microbatch` marks the last one, and the job weights the losses
            "gradient_clipping": self.settings.max_grad_norm if self._clips_itself else 0.0,
            "bf16": {"enabled": model.dtype == torch.bfloat16},
            "zero_optimization": {
                "stage": self.zero_stage,
                "reduce_bucket_size": num_elements,
                "allgather_bucket_size": num_elements,
                # It would replace torch's linear function for the whole process; our numerics need torch's own.
                "memory_efficient_linear": False,
            },
        }

    @property
    def scales_gradients(self) -> bool:  # type: ignore[override]
        """See `TrainerBackend`: from stage 1 on the gradients are in DeepSpeed's own buffers."""
        return self.zero_stage == 0

    @property
    def _clips_itself(self) -> bool:
        """Whether DeepSpeed clips the gradients. Stage 0 could clip in float32 too, but does not report the norm."""
        return self.zero_stage > 0

    def forward(self, **inputs: object) -> Tensor:
        return self._engine(**inputs).logits

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self, scale: float = 1.0) -> float:
        if scale != 1.0 and not self.scales_gradients:
            raise ValueError(f"gradients of ZeRO-{self.zero_stage} are in DeepSpeed's buffers and not scaled here")
        gradients = gradients_of(self.model.parameters())
        scale_gradients(gradients, scale)
        norm = None if self._clips_itself else clip(gradients, self.settings.max_grad_norm)
        self._engine.step()  # also drops the gradients
        return float(self._engine.get_global_grad_norm()) if norm is None else norm

    def named_tensors(self, dtype: torch.dtype | None = None) -> NamedTensors:
        return zero_tensors(self._engine, dtype)

    # -- checkpoints: the optimizer's flat partitions, unchanged -----------------------------------------------------

    def state(self) -> GatheredState:
        """Return parameters and optimizer state, to be gathered on rank 0. The optimizer's tensors fit only this ZeRO
        stage and number of ranks: "exp_avg/1/0" belongs to the first partition of rank 1. Changes nothing."""
        sizes = self._element_sizes(dict(self.model.named_parameters()))
        kept = [f"{key}/{rank}/{index}" for index, rank, key in self._partition_keys()]
        return GatheredState(
            Gathering(
                tuple(sizes), lambda: by_size(lambda: zero_tensors(self._engine, buffers=False), sizes), self.ranks
            ),
            Gathering(kept, self._gathered_partitions, self.ranks),
        )

    def load_state(self, state: TrainerState) -> None:
        import deepspeed

        shapes = {
            name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in self.model.named_parameters()
        }
        refuse_other_model(state.model, shapes)
        rank = self.ranks.rank if self.zero_stage else 0
        mine = [self._partition_state(state.optimizer, rank, index) for index in range(len(self._partitions))]
        wrong = [
            f"master/{rank}/{index}"
            for index, partition in enumerate(self._partitions)
            if "master" not in mine[index] or mine[index]["master"].shape != partition.shape
        ]
        if wrong:
            raise ValueError(
                f"the optimizer's state is of another trainer, ZeRO stage or number of ranks: {', '.join(wrong)}"
            )
        for name, parameter in self.model.named_parameters():
            with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self.zero_stage < 3 or self.ranks.is_first:
                    parameter.copy_(state.model[name])
        for found, partition in zip(mine, self._partitions, strict=True):
            with torch.no_grad():
                partition.copy_(found.pop("master"))
            self._basic_optimizer.state[partition] = {
                key: value.clone() if key == "step" else value.to(partition.device, copy=True)
                for key, value in found.items()
            }

    @property
    def _basic_optimizer(self) -> torch.optim.Optimizer:
        return self._engine.basic_optimizer

    @property
    def _partitions(self) -> list[Tensor]:
        """The flat tensors that AdamW updates on this rank; at stage 0 in float32, the parameters."""
        if self.zero_stage == 3:
            return self._engine.optimizer.fp32_partitioned_groups_flat
        return [tensor for group in self._basic_optimizer.param_groups for tensor in group["params"]]

    @property
    def _num_shards(self) -> int:
        return self.ranks.num_ranks if self.zero_stage else 1  # stage 0: every rank has the same

    def _partition_keys(self) -> Iterator[tuple[int, int, str]]:
        """Yield the number, the rank and the key of each tensor of the optimizer, of all ranks."""
        for index, partition in enumerate(self._partitions):
            for key in ("master", *self._basic_optimizer.state[partition]):
                yield from ((index, rank, key) for rank in range(self._num_shards))

    def _gathered_partitions(self) -> Iterable[tuple[str, Tensor]]:
        for index, partition in enumerate(self._partitions):
            for key, value in {"master": partition, **self._basic_optimizer.state[partition]}.items():
                shards = self._gathered(value.detach()) if self._num_shards > 1 else [value]
                yield from ((f"{key}/{rank}/{index}", shard) for rank, shard in enumerate(shards))

    def _gathered(self, value: Tensor) -> list[Tensor]:
        """Gather one tensor of each rank, in order, on rank 0. Returns [] on the other ranks."""
        value = value.to(self.ranks.device)
        shards = [torch.empty_like(value) for _ in range(self.ranks.num_ranks)] if self.ranks.is_first else None
        dist.gather(value, shards)
        return shards or []

    @staticmethod
    def _partition_state(saved: Mapping[str, Tensor], rank: int, index: int) -> dict[str, Tensor]:
        end = f"/{rank}/{index}"
        return {name.removesuffix(end): value for name, value in saved.items() if name.endswith(end)}
