"""The module that a caller gives to an engine: whole, with its weights, and not the wrapper around it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .adapters.layers import is_peft_model, without_peft_model

_SEND = (
    "Make an engine with weights of its own, Engine(folder) of the model's folder, and send it the trainer's after "
    'each step (docs/guides/weights.md, "From a trainer to many engines")'
)
_OPTIMISED = "_orig_mod"  # torch.compile's name of the module that it wraps
_FLAT = "_fsdp_wrapped_module"  # FullyShardedDataParallel's, whose parameters it cuts into flat pieces
_MOST_NAMES = 3  # of an error


def given_module(model: object, *, is_copied: bool) -> PreTrainedModel:
    """Return the transformers model that an engine can host: the given one, or the one inside a PeftModel.

    is_copied: each rank copies its part, so that DTensors may hold the weights. Raises ValueError that names what to
    pass instead of a wrapper, and how an engine gets weights that this rank does not hold whole.
    """
    if isinstance(model, nn.Module):
        model = without_peft_model(model)
    if hasattr(model, _OPTIMISED):
        raise ValueError(
            "can host a module, not what torch.compile makes of it: pass the module itself. It may be compiled in "
            "place, with module.compile(): the engine's numerics run it uncompiled"
        )
    if not isinstance(model, PreTrainedModel):
        refused = f"can host a transformers PreTrainedModel or a folder, not {type(model).__name__}"
        inside = _place_of_model(model) if isinstance(model, nn.Module) else None
        if inside is not None and _FLAT in inside.split("."):
            raise ValueError(f"{refused}: its ranks hold flat pieces of the weights. {_SEND}")
        raise ValueError(refused + (f": pass the model inside it, its attribute .{inside}" if inside else ""))
    _refuse_missing_weights(model, is_copied=is_copied)
    return model


def _place_of_model(wrapper: nn.Module) -> str | None:
    """Return the name of the outermost transformers model or PeftModel inside a wrapper; None: there is none."""
    found = (name for name, part in wrapper.named_modules() if isinstance(part, PreTrainedModel) or is_peft_model(part))
    return next(found, None)


def _refuse_missing_weights(module: PreTrainedModel, *, is_copied: bool) -> None:
    named = dict(module.named_parameters())
    name = type(module).__name__
    buffers = dict(module.named_buffers())
    if empty := [key for key, tensor in {**named, **buffers}.items() if tensor.is_meta]:
        raise ValueError(f"{name} has no weights yet: {listed(empty)} on the meta device. Load them first")
    if any(hasattr(parameter, "ds_id") for parameter in named.values()):
        raise ValueError(f"{name} is partitioned by DeepSpeed, so no rank holds its weights whole. {_SEND}")
    sharded = [key for key, parameter in named.items() if isinstance(parameter, DTensor)]
    if sharded and not is_copied:
        raise ValueError(
            f"{name} is sharded by fully_shard or another plan of DTensors ({listed(sharded)}), also where one rank "
            f"has all shards: it has no whole tensors that an engine could share. {_SEND}"
        )


def listed(names: list[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def device_of(text: str) -> torch.device:
    """Return the device of a setting, as "cuda:1". Raises ValueError for a text that names none."""
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f'device must be one such as "cpu", "cuda" or "cuda:1", not {text!r}') from error
