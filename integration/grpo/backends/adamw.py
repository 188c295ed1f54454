"""AdamW of parameters in bfloat16, whose updates would be lost.

A step of AdamW moves a weight by about the learning rate. bfloat16 keeps 8 bits of it: an update of less than 1/512 of
the weight rounds to nothing, every time again. Either float32 masters keep what a rounding leaves out, or the rounding
is stochastic: up or down with the probabilities that make it right in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ....kernels.sampling.draws import derive_seed
from ..settings.training import TrainSettings
from .gradient_sums import GradientSums

_EPSILON = 1e-8
_LOST_BITS = 16  # of a float32, that bfloat16 does not have


class TrainerAdamW(torch.optim.AdamW):
    """AdamW that updates the tensors in its groups: the parameters, or float32 masters of those in lower precision.

    Gradients in lower precision are summed over micro-batches in float32.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], settings: TrainSettings, *, has_masters: bool = True
    ) -> None:
        """Make the optimizer. has_masters: parameters in lower precision have masters; else they are updated as they
        are."""
        given = list(parameters)
        masters = [_master(one) if has_masters and one.dtype != torch.float32 else one for one in given]
        self.masters = dict(zip(given, masters, strict=True))
        self.sums = GradientSums(given)
        device = masters[0].device if masters else torch.device("cpu")
        super().__init__(_groups(masters), **adamw_options(settings, device))

    def take_gradients(self) -> list[Tensor]:
        """Move the sums of the parameters' gradients to the tensors that `step` updates. Returns them, in float32: what
        is done to them in place, `step` sees."""
        gradients = []
        for parameter, master in self.masters.items():
            if (gradient := self.sums.take(parameter)) is not None:
                master.grad = gradient
                gradients.append(gradient)
        return gradients

    def step(self, closure: Any = None) -> Any:
        """Update the masters by their gradients, and write them, rounded, into the parameters' own storage."""
        result = super().step(closure)
        with torch.no_grad():
            for parameter, master in self.masters.items():
                if master is not parameter and master.grad is not None:
                    parameter.copy_(master)
        return result

    def reset(self, parameter: nn.Parameter) -> None:
        """Forget what is kept of a parameter, and begin from its present value."""
        master = self.masters[parameter]
        self.state.pop(master, None)
        if master is not parameter:
            with torch.no_grad():
                master.copy_(parameter)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what is kept of a parameter: AdamW's moments, and its master where it has one."""
        master = self.masters[parameter]
        return dict(self.state[master]) | ({} if master is parameter else {"master": master})

    def load_state_of(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set a part of `state_of`; value: laid out as the parameter, or a step counter."""
        master = self.masters[parameter]
        with torch.no_grad():
            if key == "master":
                master.copy_(value)
            else:
                self.state[master][key] = value if key == "step" else torch.empty_like(master).copy_(value)

    def has_master(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has a master."""
        return self.masters[parameter] is not parameter


class StochasticAdamW(TrainerAdamW):
    """AdamW without masters: moments and arithmetic in float32, and updates of lower precision rounded stochastically.

    The noise is a function of the number of the step, the parameter and, of a shard, its place: a run repeats.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: TrainSettings) -> None:
        super().__init__(parameters, settings, has_masters=False)
        self._gradients: dict[nn.Parameter, Tensor] = {}  # a parameter in bfloat16 cannot hold them

    def take_gradients(self) -> list[Tensor]:
        """Take the sums of the parameters' gradients and keep them for `step`. Returns them, in float32."""
        taken = ((parameter, self.sums.take(parameter)) for parameter in self.masters)
        self._gradients = {parameter: gradient for parameter, gradient in taken if gradient is not None}
        return list(self._gradients.values())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have taken gradients, one after another."""
        assert closure is None
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if (gradient := self._gradients.pop(parameter, None)) is not None:
                    self._update(parameter, gradient, group, index)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        state, value = self.state[parameter], parameter.detach().float()
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        adamw(
            [value], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
            foreach=False, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=_EPSILON, maximize=False,
        )  # fmt: skip
        local, rounded = _local(parameter), _local(value)
        if parameter.dtype == torch.bfloat16:
            place = parameter.device_mesh.get_local_rank() if isinstance(parameter, DTensor) else 0
            rounded = rounded_stochastically(rounded, derive_seed(int(state["step"]), index, place))
        local.copy_(rounded)

    def load_state_of(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set a part of `state_of`; moments are in float32 whatever the parameter is."""
        self.state[parameter][key] = value if key == "step" else value.float().clone()


class ShardedMastersAdamW(TrainerAdamW):
    """AdamW of shards that are the masters themselves: float32, of which forwards gather roundings. Parameters beside
    them that are whole are in float32 for the forward too, and have no masters."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what is kept of a parameter, a shard itself as its master."""
        return dict(self.state[parameter]) | ({"master": parameter.detach()} if self.has_master(parameter) else {})

    def load_state_of(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """See `TrainerAdamW.load_state_of`."""
        if key != "master":
            super().load_state_of(parameter, key, value)
            return
        with torch.no_grad():
            parameter.copy_(value)

    def has_master(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has a master: a shard is one."""
        return isinstance(parameter, DTensor)


def rounded_stochastically(values: Tensor, seed: int) -> Tensor:
    """Round float32 values to bfloat16, up or down with the probabilities whose mean is the value. What bfloat16 can
    hold stays as it is, infinities and NaN too. seed: of the noise.

    Adds random bits below the last one that stays, and cuts: Zamirai et al., "Revisiting BFloat16 Training" (2020).
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(1 << _LOST_BITS, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    cut = ((values.view(torch.int32) + noise) >> _LOST_BITS) << _LOST_BITS
    return torch.where(values.isfinite(), cut.view(torch.float32), values).to(torch.bfloat16)


def adamw_options(settings: TrainSettings, device: torch.device) -> dict[str, Any]:
    """Return the options of `torch.optim.AdamW` that the settings say, for parameters on this device.

    On a CPU a tensor is updated in one pass instead of ten; elsewhere torch chooses.
    """
    betas = (settings.beta1, settings.beta2)
    fused = True if device.type == "cpu" else None
    return {"lr": settings.learning_rate, "betas": betas, "weight_decay": settings.weight_decay, "fused": fused}


def learning_rate(settings: TrainSettings, step: int, num_steps: int) -> float:
    """Return the learning rate of a step. It rises over the first `num_warmup_steps`, then follows the schedule.

    step: from 0. num_steps: of the whole run; the step after the last one has `final_share` of the rate. Raises
    ValueError for a schedule to the end of a run of no steps.
    """
    if settings.schedule != "constant" and num_steps < 1:
        raise ValueError(f'train.schedule "{settings.schedule}" needs the number of steps of the run')
    warmup = settings.num_warmup_steps
    if step < warmup:
        return settings.learning_rate * ((step + 1) / warmup)
    done = min(1.0, (step - warmup) / max(num_steps - warmup, 1))
    if settings.schedule == "constant":
        return settings.learning_rate
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * left)


def make_adamw(model: nn.Module, settings: TrainSettings) -> TrainerAdamW:
    """Make the optimizer of a model's parameters that are not frozen, as the settings say."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.low_precision == "stochastic":
        return StochasticAdamW(trained, settings)
    return TrainerAdamW(trained, settings)


def _master(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True).requires_grad_()


def _groups(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Divide tensors into groups of shards and of whole ones: torch updates no two kinds together."""
    kinds = ([one for one in tensors if isinstance(one, DTensor) is is_shard] for is_shard in (True, False))
    return [{"params": kind} for kind in kinds if kind] or [{"params": []}]


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
