"""The dtypes in which a trainer's tensors are sent: those that they have in an engine that loaded the model."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_loaded: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, Mapping[str, torch.dtype]]] = (
    weakref.WeakKeyDictionary()
)


class Cast:
    """The cast of one model's tensors to a dtype, with the exceptions that transformers makes where it loads the model
    in this dtype: tensors that its class keeps in float32, and those that its layers make in a dtype of their own.

    A buffer that was registered on the module itself, and that its class does not make, is cast: transformers loads no
    such buffer, and `module.to(dtype)` casts it too."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Read the dtypes. model: unwrapped; dtype: None for no cast."""
        self._dtype = dtype
        self._loaded = {} if dtype is None else _loaded_dtypes(model, dtype)

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which the tensor of this (bare) name is sent."""
        if self._dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return self._loaded.get(name, self._dtype)


def _loaded_dtypes(model: nn.Module, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Return the dtypes of a transformers model's tensors after `from_pretrained(dtype=...)`, by name; nothing where
    there is nothing to cast."""
    stored = model.state_dict(keep_vars=True).values()
    if not isinstance(model, PreTrainedModel) or all(t.dtype == dtype for t in stored if t.is_floating_point()):
        return {}
    known = _loaded.setdefault(model, {})
    if dtype not in known:
        plan = model._get_dtype_plan(dtype)
        known[dtype] = {
            name: next((kept for part, kept in plan.items() if _names(part, name)), tensor.dtype)
            for name, tensor in _made_without_memory(model, dtype).state_dict(keep_vars=True).items()
        }
    return known[dtype]


def _made_without_memory(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model of the same configuration on the meta device, as transformers does before it reads weights. By its
    constructor: `from_config` would divide it among the ranks where DeepSpeed's ZeRO-3 is on."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return type(model)(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(before)


def _names(pattern: str, name: str) -> bool:
    """Return whether a pattern of transformers' dtype plan, in which * stands for anything, is in a tensor's name."""
    return re.search(".*".join(map(re.escape, pattern.split("*"))), name) is not None
