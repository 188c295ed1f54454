"""An estimate of the memory that a micro-batch's activations take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ....kernels.sampling.logprobs import selected_logprobs
from ....rollout.model.hosted_model import HostedModel
from .packing import Sample

_NUM_ROWS = 64  # of the smaller one of the forwards that are measured


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that the forward of a micro-batch keeps for its backward pass, and the gradient of the logits."""

    per_row: float
    per_target: float  # in addition, where a row has logits

    def of(self, sample: Sample, num_rows: int) -> float:
        """Return the bytes of a sample that adds so many rows."""
        return self.per_row * num_rows + self.per_target * len(sample.targets)


def measure(hosted: HostedModel, *, has_entropy: bool = False) -> ActivationBytes:
    """Measure what small forwards of a model keep, by the tensors that autograd saves in them.

    Three forwards of fixed tokens, under the training's numerics, are compared: the differences are what a row and
    what a target add. Where layers are checkpointed, the layer that runs again in the backward pass is added, as an
    equal share of what all layers keep without. The memory that a backward pass needs for a moment inside one layer,
    gradients of parameters and the allocator's own are not in it. Call it before the model is sharded, in the same
    state on every run: then the micro-batches are the same too. has_entropy: the loss has that of the logits, whose
    gradient is another one of their size. Leaves the model as it was.
    """
    module = hosted.trained_module
    flags = [(part, part.training) for part in module.modules()]
    num_rows = max(min(_NUM_ROWS, hosted.max_model_len // 2), 1)
    try:
        module.train()
        row, target = _slopes(hosted, num_rows)
        layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
        if layers:
            module.eval()  # layers in eval mode are not checkpointed
            row += max(_slopes(hosted, num_rows)[0] - row, 0.0) / len(layers)
    finally:
        for part, training in flags:
            part.training = training
    gradients = (2 if has_entropy else 1) * hosted.vocab_size * hosted.dtype.itemsize
    return ActivationBytes(row, target + gradients)


def _slopes(hosted: HostedModel, num_rows: int) -> tuple[float, float]:
    """Return the bytes that a row keeps, and that a target keeps in addition."""
    small, large = kept_bytes(hosted, num_rows, 1), kept_bytes(hosted, 2 * num_rows, 1)
    with_targets = kept_bytes(hosted, 2 * num_rows, num_rows + 1)
    return (large - small) / num_rows, (with_targets - large) / num_rows


def kept_bytes(hosted: HostedModel, num_rows: int, num_targets: int) -> int:
    """Return the bytes of all tensors that autograd saves in a forward of one sequence, without parameters."""
    module, device = hosted.trained_module, hosted.device
    outside = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(num_rows, device=device) % hosted.vocab_size
    with hosted.training_numerics(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = module(
            input_ids=ids.unsqueeze(0), position_ids=torch.arange(num_rows, device=device).unsqueeze(0),
            cu_seq_lens_q=torch.tensor([0, num_rows], dtype=torch.int32, device=device),
            logits_to_keep=torch.arange(num_rows - num_targets, num_rows, device=device), use_cache=False,
        ).logits[0]  # fmt: skip
        selected_logprobs(logits, ids[-num_targets:], 1.0)
    return sum(kept.values())
