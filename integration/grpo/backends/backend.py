"""The interface of a trainer backend: the operations that differ between the ways to train on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from ....weight_sync.manifest import NamedTensors
from ...push.adapters.cast import Cast
from ...push.adapters.named_tensors import unwrapped
from ...ranks import Ranks
from ..settings.training import TrainSettings
from .adamw import TrainerAdamW, make_adamw

_CLIP_EPSILON = 1e-6
_SHARD_SIZE = "2GB"  # of a model's files: each is flushed by itself, and other ranks are told


@dataclass(frozen=True)
class TrainerState:
    """The state of a trainer from a checkpoint, as whole tensors, which may be read from a file when asked for."""

    model: Mapping[str, Tensor]  # by Hugging Face name
    optimizer: Mapping[str, Tensor]  # by names that the backend chooses


class Gathering:
    """Tensors that all ranks gather together, one after another: every rank iterates to the end. Rank 0 gets them whole
    and in main memory, those of the largest elements first; what the others get is of no use."""

    def __init__(self, names: Sequence[str], make: Callable[[], NamedTensors], ranks: Ranks) -> None:
        """Gather nothing yet. names: of all tensors, in any order; make: gathers them."""
        self.names, self.make, self.ranks = names, make, ranks
        self._left: Iterator[tuple[str, Tensor]] | None = None  # of the last iteration

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Begin to gather."""
        self._left = self._gathered()
        return self._left

    def finish(self) -> None:
        """Gather what the last iteration has left, or all where there was none: in each, the other ranks wait for this
        one."""
        for _ in self._left or self._gathered():
            pass

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.make():
            if self.ranks.is_first:
                self.ranks.activity.note(tensor.nbytes)
            yield name, tensor.detach().cpu() if self.ranks.is_first else tensor


@dataclass(frozen=True)
class GatheredState:
    """The state of a trainer for a checkpoint, of which rank 0 has one tensor at a time. All ranks iterate over the
    model, then over the optimizer."""

    model: Gathering
    optimizer: Gathering


class TrainerBackend(ABC):
    """One model on all ranks with its AdamW optimizer. After `wrap`, all ranks call every method together.

    A step is: for each micro-batch, inside `microbatch(is_last=...)`, `forward` and `backward`; then `step`. Gradients
    are averaged over ranks, and summed over micro-batches in float32 whatever the parameters' dtype.
    """

    # Whether the module keeps whole parameters. Then an engine may alias them, also one that was made before `wrap`.
    shares_storage: bool
    # Whether every micro-batch runs collectives. Then all ranks need the same number of micro-batches.
    talks_in_forward: bool
    # Whether all micro-batches of a step have to be known before the first.
    needs_all_batches: bool = True
    # Whether the last micro-batch has to be known as such.
    needs_last: bool = True
    # The dtype to which `named_tensors` casts by itself; None: each tensor has its own.
    gathered_dtype: torch.dtype | None = None
    # Whether `step` can scale the gradients. All that can are used so: then they train alike, to the bit.
    scales_gradients: bool = True

    model: PreTrainedModel
    optimizer: TrainerAdamW

    def __init__(self, settings: TrainSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks

    @abstractmethod
    def wrap(self, model: PreTrainedModel) -> None:
        """Wrap or shard the model in place, and make the optimizer. Call it once, on every rank."""

    @abstractmethod
    def forward(self, **inputs: object) -> Tensor:
        """Compute the logits [1, M, V] with the wrapped model."""

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Enclose the forward and backward of one micro-batch. is_last: it is the last one of the step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of all parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def step(self, scale: float = 1.0) -> float:
        """Multiply the gradients by `scale`, clip them, update the parameters and drop the gradients. Returns the
        gradients' norm before clipping."""
        gradients = self.optimizer.take_gradients()
        scale_gradients(gradients, scale)
        norm = clip(gradients, self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @abstractmethod
    def named_tensors(self, dtype: torch.dtype | None = None) -> NamedTensors:
        """Gather the whole parameters and stored buffers by Hugging Face name, cast to `dtype`, with the backend's
        adapter. Every rank must iterate to the end."""

    def save_pretrained(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the model as a folder. tensors: `named_tensors`, whole."""
        self.model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=_SHARD_SIZE)

    def state(self) -> GatheredState:
        """Return the trained parameters and the optimizer state, to be gathered on rank 0. Changes nothing."""
        trained = self._trained()
        moments = {
            f"{key}/{name}": value
            for name, parameter in trained.items()
            for key, value in self.optimizer.state_of(parameter).items()
        }

        sizes = self._element_sizes(trained)

        def kept() -> NamedTensors:
            for name in sorted(moments, key=lambda name: (-moments[name].element_size(), name)):
                yield name, _whole(moments[name])

        return GatheredState(
            Gathering(tuple(trained), lambda: by_size(self.named_tensors, sizes), self.ranks),
            Gathering(tuple(moments), kept, self.ranks),
        )

    def load_state(self, state: TrainerState) -> None:
        """Copy a state into model and optimizer, in place. `state` gathered it on rank 0; here every rank passes it.

        Raises ValueError, naming the tensors in which state and model differ, before anything is changed.
        """
        parameters = self._trained()
        refuse_other_model(state.model, {name: parameter.shape for name, parameter in parameters.items()})
        saved = list(state.optimizer)
        moments = [key_and_name.partition("/")[::2] for key_and_name in saved]
        foreign = [f"{key}/{name}" for key, name in moments if name not in parameters]
        foreign += [
            f"master/{name}"
            for name, parameter in parameters.items()
            if f"step/{name}" in saved and (f"master/{name}" in saved) != self.optimizer.has_master(parameter)
        ]
        if foreign:
            raise ValueError(f"the optimizer's state is of another trainer: {', '.join(foreign)}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(_laid_out_like(parameter, state.model[name]))
                self.optimizer.reset(parameter)
        for key, name in moments:
            parameter, value = parameters[name], state.optimizer[f"{key}/{name}"]
            # Step counters stay on the CPU, where the optimizer makes them; moments are on their parameter's device.
            # Moments are copied, because a shard would keep the whole tensor's memory.
            self.optimizer.load_state_of(parameter, key, value if key == "step" else _laid_out_like(parameter, value))

    def adamw(self, model: nn.Module) -> TrainerAdamW:
        """Make the optimizer of the model's parameters that are not frozen, as the settings say."""
        return make_adamw(model, self.settings)

    def _element_sizes(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the bytes of an element of each parameter, as `named_tensors` gathers it."""
        cast = Cast(unwrapped(self.model), self.gathered_dtype)
        return {name: cast.dtype_of(name, parameter).itemsize for name, parameter in parameters.items()}

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are not frozen, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def on_first(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Iterate to the end on every rank; return the tensors in main memory on rank 0, and {} on the others."""
        kept = {}
        for name, tensor in tensors:
            if self.ranks.is_first:
                kept[name] = tensor.detach().cpu()
                self.ranks.activity.note(tensor.nbytes)
        return kept


def by_size(gather: Callable[[], NamedTensors], sizes: Mapping[str, int]) -> NamedTensors:
    """Yield the tensors that `sizes` names, those of the largest elements first: so each lies aligned in a file. Where
    there are several sizes, all are gathered for each. sizes: bytes of an element, by name."""
    for size in sorted(set(sizes.values()), reverse=True):
        yield from ((name, tensor) for name, tensor in gather() if sizes.get(name) == size)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def scale_gradients(gradients: Iterable[Tensor], scale: float) -> None:
    """Multiply gradients, or this rank's shards of them, in place."""
    if scale != 1.0:
        for gradient in gradients:
            gradient.mul_(scale)


def clip(gradients: Sequence[Tensor], max_norm: float) -> float:
    """Clip gradients to a total norm over all ranks' shards, in place. Returns the norm before clipping."""
    norm = _total_norm(gradients)
    coefficient = (max_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)  # as torch's clip_grads_with_norm_
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.device))
    return float(norm)


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of shards, over all ranks, and of whole gradients, which each rank has: torch sums no two kinds
    together."""
    shards, whole = ([one for one in gradients if isinstance(one, DTensor) is kind] for kind in (True, False))
    if not (shards and whole):
        return _whole(get_total_norm(gradients))
    return torch.hypot(_whole(get_total_norm(shards)), get_total_norm(whole))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Move a whole tensor to the parameter's device and shard it as the parameter is sharded.

    Every rank has the value, so nothing is sent.
    """
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def refuse_other_model(saved: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise ValueError, naming the parameters, where saved tensors and a model's shapes differ."""
    differing = sorted(
        name
        for name in {*saved, *shapes}
        if name not in saved or name not in shapes or saved[name].shape != shapes[name]
    )
    if differing:
        raise ValueError(f"the state is of another model: {', '.join(differing)}")
