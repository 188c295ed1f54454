"""The model to which a policy is held, or by which it is taught: log-probabilities of sampled tokens under it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....kernels.sampling.logprobs import selected_logprobs
from ....rollout.model.hosted_model import HostedModel
from .packing import PackedBatch


class Reference:
    """A frozen model: another one, a copy of the trained module as it is now, or its base without its adapters."""

    def __init__(self, hosted: HostedModel, temperature: float, other: PreTrainedModel | None = None) -> None:
        """Freeze and adopt the model, with the numerics of the trained one. Call it before the module is sharded.

        hosted: the trained model; temperature: of the log-probabilities; other: a model with the same tokens.
        """
        self.model, self._temperature, self._is_other = hosted, temperature, other is not None
        if other is None and hosted.adapters:
            return
        module = copy.deepcopy(hosted.trained_module) if other is None else other
        frozen = module.requires_grad_(False).eval()
        invariant = hosted.numerics.guarantee is not None
        self.model = HostedModel.adopt(
            frozen, dtype=None, device=None, invariant=invariant, k_blocks=hosted.k_blocks if other is None else 1
        )

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Compute the log-probabilities of a batch's tokens, float32 [M]. Raises ValueError for images that another
        model would have to read."""
        model = self.model
        if self._is_other and batch.of_images:
            raise ValueError(
                "train.reference must not be set for samples with images: another model may read them anew"
            )
        with torch.no_grad(), model.adapters.switched_off(), model.training_numerics():
            logits = batch.kept(model.trained_module(**batch.model_inputs()).logits)
            return selected_logprobs(logits, batch.targets, self._temperature)
