"""Gradient checkpointing: layers whose activations are computed again in the backward pass."""

from __future__ import annotations

from transformers import PreTrainedModel


def refuse_without_layers(model: PreTrainedModel) -> None:
    """Raise ValueError for a model class whose layers cannot be checkpointed."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"train.gradient_checkpointing must be false: {type(model).__name__} does not support it")


def switch_on(model: PreTrainedModel) -> None:
    """Let each layer of a model keep its input alone in a forward of the trainer, and run again in the backward pass.

    Layers in eval mode, and so the forwards of an engine that aliases the model, are unaffected. Under
    `training_numerics` the second run has the bits of the first. Raises ValueError as `refuse_without_layers`.
    """
    refuse_without_layers(model)
    # Older versions of transformers know the second name only.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
