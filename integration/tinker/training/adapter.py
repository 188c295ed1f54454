"""An adapter that is trained: its weights, the sums of its gradients, and its AdamW, apart from any module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ...grpo.backends.backend import clip
from .data import BadInput
from .targets import AdapterSpec

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class AdamParams:
    """The settings of one step of AdamW, with the API's defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # of all gradients together; 0: they are not clipped

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            most = 1.0 if field.name.startswith("beta") else math.inf
            if not (0 <= value < most):
                raise BadInput(f"adam_params: {field.name} must be a number from 0 and below {most}, not {value}")
        if self.eps == 0:  # half of an adapter has no gradient before its first step: 0 / 0
            raise BadInput("adam_params: eps must be above 0")


class TrainedAdapter:
    """One adapter in training. Weights, gradients and moments are float32; forwards get the weights in the model's
    dtype: bfloat16 keeps 8 bits, in which most updates would be lost.
    """

    def __init__(
        self, spec: AdapterSpec, values: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take values of the weights, by PEFT's names. dtype: the model's."""
        self.spec, self._dtype = spec, dtype
        self._masters = {
            name: nn.Parameter(value.to(device, torch.float32, copy=True)) for name, value in values.items()
        }
        # On a CPU a tensor is updated in one pass instead of ten; elsewhere torch chooses.
        fused = True if device.type == "cpu" else None
        self._optimizer = torch.optim.AdamW(list(self._masters.values()), fused=fused)
        self.num_steps = 0

    def weights(self) -> Tensors:
        """Return the weights in the model's dtype. Those in float32 are the adapter's own tensors."""
        return {name: master.detach().to(self._dtype) for name, master in self._masters.items()}

    def snapshot(self) -> Tensors:
        """Return a copy of the weights in the model's dtype, which later steps leave as it is."""
        return {name: master.detach().to(self._dtype, copy=True) for name, master in self._masters.items()}

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass has added gradients since the last step."""
        return any(master.grad is not None for master in self._masters.values())

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add float32 gradients, by PEFT's names, to the sums."""
        for name, gradient in gradients.items():
            master = self._masters[name]
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, params: AdamParams) -> dict[str, float]:
        """Update the weights by the gradients, and drop these. Returns metrics.

        Raises BadInput, and changes neither weights nor the optimizer's state, without gradients, and for a step whose
        gradients or new weights are not finite, whose gradients it drops.
        """
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if not gradients:
            raise BadInput("optim_step: there are no gradients; call forward_backward first")
        norm = clip(gradients, params.grad_clip_norm or math.inf)
        if not math.isfinite(norm):
            self.drop_gradients()
            raise BadInput(f"optim_step: the gradients are not finite (their norm is {norm}); they are dropped")
        for group in self._optimizer.param_groups:
            group |= {
                "lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": params.eps,
                "weight_decay": params.weight_decay,
            }  # fmt: skip
        before = [{name: own.clone() for name, own in part.items()} for part in self.state()]
        self._optimizer.step()
        self.drop_gradients()
        if not all(bool(master.isfinite().all()) for master in self._masters.values()):
            self.load(*before)
            raise BadInput(
                f"optim_step: the new weights are not finite (learning_rate is {params.learning_rate:g}); they are as "
                "before, and the gradients are dropped"
            )
        self.num_steps += 1
        return {"grad_norm": norm}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensors, Tensors]:
        """Return the float32 weights, and the optimizer's state by "key/name". Changes nothing."""
        moments = {
            f"{key}/{name}": value.detach()
            for name, master in self._masters.items()
            for key, value in self._optimizer.state[master].items()
        }
        return {name: master.detach() for name, master in self._masters.items()}, moments

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor] | None) -> None:
        """Take weights and, unless it is None, the optimizer's state; else that begins anew. Gradients are dropped.

        Raises BadInput, naming the tensors, for those of another adapter; nothing has changed then.
        """
        wrong = [
            name
            for name in sorted(weights.keys() | self._masters.keys())
            if name not in weights or name not in self._masters or weights[name].shape != self._masters[name].shape
        ]
        parts = {key: key.partition("/")[::2] for key in moments or ()}
        wrong += [key for key, (_, name) in parts.items() if name not in self._masters]
        if wrong:
            raise BadInput(f"the checkpoint is of another adapter or model: {', '.join(wrong[:8])}")
        self.drop_gradients()
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(weights[name])
        for key, value in (moments or {}).items():
            kind, name = parts[key]
            master = self._masters[name]
            kept = value.clone() if kind == "step" else torch.empty_like(master).copy_(value)
            self._optimizer.state[master][kind] = kept.detach()
