"""What differs between the ways to train a model on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from ....weight_sync.manifest import NamedTensors
from ...ranks import Ranks
from ..sections import TrainSettings


@dataclass(frozen=True)
class TrainerState:
    """Everything a checkpoint keeps of a trainer, as whole tensors. Rank 0 has it; on the others it is empty."""

    model: dict[str, Tensor] = field(default_factory=dict)  # by Hugging Face name
    optimizer: dict[str, Tensor] = field(default_factory=dict)  # by names of the backend's choice


class TrainerBackend(ABC):
    """One model on all ranks with its AdamW. After `wrap`, every rank calls every method together.

    A step is: for each micro-batch, inside `microbatch(is_last=...)`, `forward` and `backward`; then `step`. Gradients
    are averaged over ranks.
    """

    shares_storage: bool  # the module keeps whole parameters, which an engine made from it, before or after, may alias
    talks_in_forward: bool  # ranks meet in every micro-batch, so that all must have as many

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer

    def __init__(self, settings: TrainSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks

    @abstractmethod
    def wrap(self, model: PreTrainedModel) -> None:
        """Take the model over: wrap or shard it where it is, and make the optimizer. Once, on every rank."""

    @abstractmethod
    def forward(self, **inputs: object) -> Tensor:
        """Logits [1, M, V] of the wrapped model."""

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The forward and backward of one micro-batch run in here; `is_last` of the step's."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def step(self) -> float:
        """Clip the gradients, let the optimizer write the parameters, drop the gradients; returns the norm before
        clipping."""
        norm = clip(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @abstractmethod
    def named_tensors(self, dtype: torch.dtype | None = None) -> NamedTensors:
        """The whole parameters by Hugging Face name, cast to `dtype`, as the backend's adapter gives them. Every rank
        must iterate to the end."""

    def state(self) -> TrainerState:
        """Gather parameters and optimizer on rank 0. Changes nothing."""
        moments = (
            (f"{key}/{name}", _whole(value))
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        )
        return TrainerState(self.on_first(self.named_tensors()), self.on_first(moments))

    def load_state(self, state: TrainerState) -> None:
        """Put a state that `state` gave on rank 0, and that every rank has now, into model and optimizer, in place.

        Raises ValueError naming the tensors in which state and model differ; then nothing was changed.
        """
        parameters = dict(self.model.named_parameters())
        refuse_other_model(state.model, {name: parameter.shape for name, parameter in parameters.items()})
        moments = [(*key_and_name.partition("/")[::2], value) for key_and_name, value in state.optimizer.items()]
        if foreign := [f"{key}/{name}" for key, name, _ in moments if name not in parameters]:
            raise ValueError(f"the optimizer's state is of another trainer: {', '.join(foreign)}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(_laid_out_like(parameter, state.model[name]))
        for key, name, value in moments:
            parameter = parameters[name]
            # Step counters stay on the CPU, as the optimizer makes them; moments stand beside their parameter. Copied,
            # because a shard would keep the whole tensor's memory.
            state = self.optimizer.state[parameter]
            state[key] = value if key == "step" else torch.empty_like(parameter).copy_(_laid_out_like(parameter, value))

    def adamw(self, model: nn.Module) -> torch.optim.AdamW:
        settings = self.settings
        return torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )

    def on_first(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """What a collective iteration yields, kept on rank 0 and in its main memory alone."""
        kept = {}
        for name, tensor in tensors:
            if self.ranks.is_first:
                kept[name] = tensor.detach().cpu()
        return kept


def clip(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Clip gradients to a total norm over all ranks' shards; returns the norm before."""
    parameters = list(parameters)
    norm = _whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
    clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A whole tensor on the parameter's device, cut as it is. Every rank has the value, so nothing is sent."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def refuse_other_model(saved: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    differing = sorted(
        name
        for name in {*saved, *shapes}
        if name not in saved or name not in shapes or saved[name].shape != shapes[name]
    )
    if differing:
        raise ValueError(f"the state is of another model: {', '.join(differing)}")
