"""The module that a caller gives to an engine: whole, with its weights, and not the wrapper around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .adapters.layers import is_peft_model, without_peft_model

_SEND = (
    "Make an engine with weights of its own, Engine(folder) of the model's folder, and send it the trainer's after "
    'each step (docs/guides/weights.md, "From a trainer to many engines")'
)
_OPTIMISED = "_orig_mod"  # torch.compile's name of the module that it wraps
_FLAT = "_fsdp_wrapped_module"  # FullyShardedDataParallel's, whose parameters it cuts into flat pieces
_DEVICES = 'device must be one such as "cpu", "cuda" or "cuda:1"'
_MOST_NAMES = 3  # of an error
_QUANTISED_PARTS = "torch.ao.nn."  # begin of the modules of PyTorch's own quantised layers, which pack their weights


def given_module(model: object, *, is_copied: bool, is_filled_later: bool = False) -> PreTrainedModel:
    """Return the transformers model that an engine can host: the given one, or the one inside a PeftModel.

    is_copied: each rank copies its part, so that DTensors may hold the weights. is_filled_later: weights may be on the
    meta device. Raises ValueError that names what to pass instead of a wrapper, and how an engine gets weights that
    this rank does not hold whole.
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
    _refuse_missing_weights(model, is_copied=is_copied, is_filled_later=is_filled_later)
    _refuse_quantised_weights(model)
    return model


def _place_of_model(wrapper: nn.Module) -> str | None:
    """Return the name of the outermost transformers model or PeftModel inside a wrapper; None: there is none."""
    found = (name for name, part in wrapper.named_modules() if isinstance(part, PreTrainedModel) or is_peft_model(part))
    return next(found, None)


def _refuse_missing_weights(module: PreTrainedModel, *, is_copied: bool, is_filled_later: bool) -> None:
    named = dict(module.named_parameters())
    name = type(module).__name__
    buffers = dict(module.named_buffers())
    if not is_filled_later and (empty := [key for key, tensor in {**named, **buffers}.items() if tensor.is_meta]):
        raise ValueError(f"{name} has no weights yet: {listed(empty)} on the meta device. Load them first")
    if any(hasattr(parameter, "ds_id") for parameter in named.values()):
        raise ValueError(f"{name} is partitioned by DeepSpeed, so no rank holds its weights whole. {_SEND}")
    sharded = [key for key, parameter in named.items() if isinstance(parameter, DTensor)]
    if sharded and not is_copied:
        raise ValueError(
            f"{name} is sharded by fully_shard or another plan of DTensors ({listed(sharded)}), also where one rank "
            f"has all shards: it has no whole tensors that an engine could share. {_SEND}"
        )


def _refuse_quantised_weights(module: PreTrainedModel) -> None:
    """Raise ValueError for weights that are not numbers of 16 or more bits in plain memory, which kernels read."""
    wrong = [
        f"{name} ({kind or str(parameter.dtype)})"
        for name, parameter in module.named_parameters()
        if (kind := class_of_memory(parameter)) or parameter.element_size() == 1
    ]
    for name, part in module.named_modules():
        if type(part).__module__.startswith(_QUANTISED_PARTS):
            wrong.append(f"{name} ({type(part).__module__}.{type(part).__name__})")
    if wrong:
        raise ValueError(
            f"{type(module).__name__} has quantised weights, or others that kernels cannot read: {listed(wrong)}. The "
            "engine computes in float32 or bfloat16: pass the model as it was before, or dequantised"
        )


def class_of_memory(tensor: Tensor) -> str:
    """Return the name of a tensor's class where that says what the tensor's bytes are, as that of a quantised tensor
    (torchao); empty for one whose memory holds its numbers, and for shards, which DTensors hold."""
    kind = type(tensor)
    is_plain = kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(tensor, DTensor)
    return "" if is_plain else kind.__name__


def listed(names: list[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def device_of(text: str) -> torch.device:
    """Return the device of a setting, as "cuda:1". Raises ValueError for a text that names none."""
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"{_DEVICES}, not {text!r}") from error


def present_device(text: str) -> torch.device:
    """Return the device of a setting on which weights can be loaded. Raises ValueError for one of another kind, and for
    a GPU that this process has not."""
    device = device_of(text)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{_DEVICES}, not {text!r}")
    num_gpus = torch.cuda.device_count()  # 0 for a build of PyTorch without CUDA
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ValueError(f"device is {text!r}, but PyTorch {torch.__version__} finds {num_gpus} GPUs here")
    return device
