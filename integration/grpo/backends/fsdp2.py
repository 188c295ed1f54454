"""FSDP2 as the trainer's backend."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
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

    Parameters that such a model keeps in float32, of routers for example, are whole on every rank: a unit gathers its
    parameters in one dtype, and the engine computes with these in float32. Their gradients are averaged once a step.
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
        self._whole = _kept_in_float32(model)
        for module in [*_units(model), model]:
            if self._has_masters:  # one unit at a time: the whole model is never there in float32
                _widen(module)
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=set(self._whole))
        # Logits are a view of the last matrix product; no code writes into them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        self.optimizer = self.adamw(model)

    def adamw(self, model: nn.Module) -> TrainerAdamW:
        """Make the optimizer of the shards. They are the masters where the model is in lower precision."""
        if self._has_masters:
            return ShardedMastersAdamW(self._trained().values(), self.settings)
        return super().adamw(model)

    def step(self, scale: float = 1.0) -> float:
        self._average_whole()
        return super().step(scale)

    def _average_whole(self) -> None:
        """Average the gradients of the whole parameters over all ranks. One that no rank has a gradient of keeps none;
        where only some ranks have one, it counts as zeros on the others."""
        trained = [parameter for parameter in self._whole if parameter.requires_grad]
        if not trained or self.ranks.num_ranks == 1:
            return
        has_gradient = torch.tensor([float(one.grad is not None) for one in trained], device=self.ranks.device)
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
        used = [one for one, is_used in zip(trained, has_gradient.tolist(), strict=True) if is_used]
        if not used:
            return
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in used]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(self.ranks.num_ranks)
        dist.all_reduce(flat)
        for parameter, mean in zip(used, flat.split([one.numel() for one in used]), strict=True):
            parameter.grad = mean.view(parameter.shape)

    def forward(self, **inputs: object) -> Tensor:
        return self.model(**inputs).logits

    def named_tensors(self, dtype: torch.dtype | None = None) -> NamedTensors:
        return fsdp2_tensors(self.model, dtype or self._dtype)

    def save_pretrained(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the model as a folder, in the dtype of `named_tensors`."""
        super().save_pretrained(folder, tensors)
        self.model.config.dtype = self._dtype  # transformers has written that of the masters
        self.model.config.save_pretrained(folder)


def _kept_in_float32(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the float32 parameters of a model in lower precision; nothing for a model in float32."""
    if model.dtype == torch.float32:
        return []
    return [parameter for parameter in model.parameters() if parameter.dtype == torch.float32]


def _units(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules to shard as one unit each: those of transformers' list of classes. Of modules inside each
    other, it is the outermost. A module that has a parameter in common with the rest of the model is none, and its
    parameters are sharded with the root."""
    classes, total = set(model._no_split_modules or ()), _num_owners(model)

    def inside(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child).__name__ in classes and _num_owners(child).items() <= total.items():
                yield child
            else:
                yield from inside(child)

    return list(inside(model))


def _num_owners(module: nn.Module) -> dict[nn.Parameter, int]:
    """Return how many places of a module own each of its parameters: one of a shared module has several."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _widen(module: nn.Module) -> None:
    """Change the parameters of a module that are not sharded yet to float32. Buffers and ties stay."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()
