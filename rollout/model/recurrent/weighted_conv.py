"""Short convolutions whose weights are static ones plus a row's own, shared by the channels of a head (Inkling 2).

The module's own code runs over neighbouring rows, which may be of other sequences. A module is recognised by its
parameters and by the results of its code on a trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....kernels.recurrent.windows import causal_windows
from ..operations.row_positions import RowCache
from .delta_rule import UNLIKE
from .rows import rows_of

Forward = Callable[..., Any]

_PARAMETERS = ["static_weight", "weight_proj.weight"]


def weighted_conv_forward(module: nn.Module) -> Forward | None:
    """Return the forward of such a convolution with its sequences' states; None for any other module."""
    parameters = dict(module.named_parameters())
    if list(parameters) != _PARAMETERS or not hasattr(module, "conv_idx") or not hasattr(module, "layer_idx"):
        return None
    if not _is_like(module):
        return None

    def forward(hidden_states: Tensor, dynamic_input: Tensor, *given: object, **named: object) -> Tensor:
        own = module.weight_proj(dynamic_input)  # type: ignore[operator]
        cache = next((one for one in (*given, *named.values()) if isinstance(one, RowCache)), None)
        return _compute(module, module.static_weight, own, hidden_states, cache)  # type: ignore[arg-type]

    return forward


def _compute(module: nn.Module, static: Tensor, own: Tensor, hidden: Tensor, cache: RowCache | None) -> Tensor:
    """Compute the convolution of hidden [B, T, C], plus hidden, scaled, with the states of a module's sequences.

    static [w, C]: the weights of all rows, that of the row itself first; own [B, T, heads * w]: what a row adds.
    """
    (batch, num_rows, num_channels), width = hidden.shape, len(static)
    rows = rows_of(module, batch, num_rows, hidden.device, {} if cache is None else cache.keywords)
    name, x = f"conv{module.conv_idx}", hidden.float().flatten(0, 1)
    slots = rows.slots(name)
    taps, final = causal_windows(x, rows.cu_seqlens, width, slots)
    rows.leave(name, final)
    of_rows = own.float().view(len(x), -1, 1, width)
    total: Tensor | None = None
    for lag, inputs in enumerate(taps):
        weight = static[lag].float().view(of_rows.shape[1], -1) + of_rows[..., lag]
        part = weight.view(len(x), num_channels) * inputs
        total = part if total is None else total + part
    assert total is not None
    return ((total + x) / math.sqrt(2 * width + 1)).to(hidden.dtype).view(batch, num_rows, num_channels)


def _is_like(module: nn.Module) -> bool:
    """Return whether the module's code computes the same on a trial, with other parameters."""
    given, generator = dict(module.named_parameters()), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        device = given[_PARAMETERS[0]].device
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)

    static, projection = (drawn(*given[name].shape) for name in _PARAMETERS)
    hidden, dynamic_input = drawn(1, 7, static.shape[1]), drawn(1, 7, projection.shape[1])
    trial = dict(zip(_PARAMETERS, (static, projection), strict=True))
    try:
        with torch.no_grad():
            found = torch.func.functional_call(module, trial, (hidden, dynamic_input))
            expected = _compute(module, static, F.linear(dynamic_input, projection), hidden, None)
    except UNLIKE:
        return False
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4)
