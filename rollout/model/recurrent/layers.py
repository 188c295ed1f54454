"""The recurrent layers that can be hosted: their forward with our operations under the names that it calls.

A layer's class keeps its own code. The functions that it calls by a global name are replaced in a copy of that code by
ours, which find the layer's sequences and states. A function is recognised by its results, not by its name alone.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ....kernels.recurrent.conv import causal_conv, causal_conv_in_slots
from ..operations.copied_code import innermost, with_names
from ..operations.functions import outside_modes
from ..operations.row_positions import RowCache
from .conv_projection import conv_projection_forward
from .delta_rule import UNLIKE, delta_rule_of, is_channel_delta_rule, is_delta_rule
from .heads import UNDIVIDED, HeadDivision
from .lightning import lightning_forward
from .rows import LayerCall, rows_of
from .selective_scan import is_inner_shortcut, is_selective_scan, selective_scan_of
from .state_space import is_shortcut, is_state_space, state_space_of, without_shortcut
from .weighted_conv import weighted_conv_forward

Forward = Callable[..., Any]

_CACHES = ("cache_params", "past_key_values", "cache")  # keywords of layers, up to transformers 5.23 and since


def recurrent_forward(module: nn.Module, division: HeadDivision = UNDIVIDED) -> Forward | None:
    """Return the forward of a recurrent layer with its states in a rollout step; None for any other module.

    division: of the heads, and of their states, in a rollout step.
    """
    own = type(module).forward
    code = innermost(own)
    if code is None or not hasattr(module, "layer_idx"):
        return None
    if (weighted := weighted_conv_forward(module)) is not None:
        return weighted
    if (lightning := lightning_forward(module, division)) is not None:
        return lightning
    if (projection := conv_projection_forward(module)) is not None:
        return projection
    called = {name: code.__globals__.get(name) for name in code.__code__.co_names if name in _OPERATIONS}
    if not called or not all(_OPERATIONS[name][0](function) for name, function in called.items()):
        return None
    call = LayerCall()
    ours = {name: outside_modes(_OPERATIONS[name][1](module, division, call)) for name in called}
    copy = with_names(own, ours)
    return copy and _without_cache(types.MethodType(copy, module), call)


def _without_cache(forward: Forward, call: LayerCall) -> Forward:
    """Return the forward without the cache of transformers, which modules make by themselves and ours does not fill.

    call: is told the keywords, or those that a `RowCache` brings where the module is told of nothing but the cache.
    """

    def run(*args: Any, **named: Any) -> Any:
        of_layer = [cache.keywords for name in _CACHES if isinstance(cache := named.get(name), RowCache)]
        call.begin(of_layer[0] if of_layer else named)
        try:
            return forward(*args, **{**named, **{name: None for name in _CACHES if name in named}})
        finally:
            call.begin({})

    return run


# -- the convolution --------------------------------------------------------------------------------------------------


def _conv_of(module: nn.Module, division: HeadDivision, call: LayerCall) -> Forward:
    """Return the convolution for one layer, or for one of several. Its states are small, and whole on every rank."""
    name = f"conv{getattr(module, 'conv_idx', '')}"  # of its state among the layer's

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: Literal["silu"] | None = None,
        **_: object,
    ) -> Tensor:
        # hidden_states [B, C, T], weight [C, W]
        if activation not in (None, "silu"):
            raise ValueError(f"{type(module).__name__}: a convolution with activation {activation!r} is not supported")
        batch, num_channels, num_rows = hidden_states.shape
        rows = rows_of(module, batch, num_rows, hidden_states.device, call.keywords, spreads=True)
        x = hidden_states.transpose(1, 2).reshape(batch * num_rows, num_channels).to(weight.dtype)
        if (slots := rows.slots(name)) is not None:
            out = causal_conv_in_slots(x, weight, bias, rows.cu_seqlens, slots, activation)
        else:
            [x] = rows.spread(x)
            out, final = causal_conv(x, weight, bias, rows.cu_seqlens, None, activation)
            rows.keep(name, final)
            out = rows.kept(out)
        return out.to(hidden_states.dtype).view(batch, num_rows, num_channels).transpose(1, 2)

    return causal_conv1d_fn


@cache
def _is_causal_conv(function: Forward) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, 9), (6, 4), (6,)
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)
    try:
        found = inspect.unwrap(function)(x, weight, bias)
    except UNLIKE:
        return False
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    expected = causal_conv(x.transpose(1, 2).reshape(18, 6), weight, bias, ends)[0].view(2, 9, 6).transpose(1, 2)
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)


# name of a global function -> whether a function is the one that we know, and ours for a layer
_OPERATIONS: dict[str, tuple[Callable[[Any], bool], Callable[[nn.Module, HeadDivision, LayerCall], Forward]]] = {
    "causal_conv1d_fn": (_is_causal_conv, _conv_of),
    "torch_chunk_gated_delta_rule": (is_delta_rule, delta_rule_of),
    "chunk_kimi_delta_attention": (is_channel_delta_rule, delta_rule_of),
    "mamba2_chunk_scan": (is_state_space, state_space_of),
    "mamba2_split_conv1d_scan_combined": (is_shortcut, without_shortcut),
    "mamba_selective_scan": (is_selective_scan, selective_scan_of),
    "mamba_inner_fn": (is_inner_shortcut, without_shortcut),
}
