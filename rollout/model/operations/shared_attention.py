"""Attention that several layers share (Zamba): its own code is told the layer of each call, and tells the hosted one.

Such a module has no index of a layer, or none that counts: each call has KV of its own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]

LAYER = "lockstep_layer"  # keyword of the hosted attention: the layer of a call, where the module's own does not count
_TOLD = "layer_idx"


def shared_attention_forward(module: nn.Module) -> Forward | None:
    """Return the forward of an attention that is told its layer in each call and passes keywords on to the attention
    interface; None for any other module."""
    signature = inspect.signature(type(module).forward)
    kinds = {each.kind for each in signature.parameters.values()}
    if _TOLD not in signature.parameters or inspect.Parameter.VAR_KEYWORD not in kinds:
        return None
    if not hasattr(module, "is_causal"):
        return None
    own = types.MethodType(type(module).forward, module)
    signature = inspect.signature(own)

    def run(*args: Any, **named: Any) -> Any:
        return own(*args, **named, **{LAYER: signature.bind(*args, **named).arguments[_TOLD]})

    return run
