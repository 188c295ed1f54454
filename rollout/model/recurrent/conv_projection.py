"""Queries, keys and values of compressed convolutional attention (ZAYA1, https://arxiv.org/abs/2510.04476).

Queries and keys pass two causal convolutions, one of each channel and one of each head; half of a value is that of the
token before. The module's own code looks at neighbouring rows, which may be of other sequences. A class is recognised
by its attributes and by the results of its code on a small trial layer. Letters: B batch, T tokens, R rows, C channels
of queries and keys, G their heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.recurrent.windows import causal_windows
from ..operations.row_positions import RowCache
from .delta_rule import UNLIKE
from .rows import RecurrentRows, rows_of

Forward = Callable[..., Any]

_PARTS = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "conv_qk_depthwise", "conv_qk_grouped", "head_dim")


def conv_projection_forward(module: nn.Module) -> Forward | None:
    """Return the forward of such a projection with its sequences' states; None for any other module."""
    if not hasattr(module, "layer_idx") or not all(hasattr(module, name) for name in _PARTS):
        return None
    kind: Any = type(module)
    if not _is_plain(module.conv_qk_depthwise) or not _is_plain(module.conv_qk_grouped):
        return None
    return _forward_of(module) if _is_like(kind, kind.forward) else None


def _is_plain(convolution: object) -> bool:
    """Return whether it is torch's own, which an adapter around it is not, over rows without padding or strides."""
    if type(convolution) is not nn.Conv1d:
        return False
    return (convolution.stride, convolution.padding, convolution.dilation) == ((1,), (0,), (1,))


def _forward_of(module: Any) -> Forward:
    def forward(
        hidden_states: Tensor, past_key_values: RowCache | None = None, conv_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # conv_mask [B, T]: of padding, whose rows are zeros
        if conv_mask is not None:
            hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
        batch, num_rows = hidden_states.shape[:2]
        keywords = {} if past_key_values is None else past_key_values.keywords
        rows = rows_of(module, batch, num_rows, hidden_states.device, keywords)
        query, key = module.q_proj(hidden_states), module.k_proj(hidden_states)
        mixed = _convolved(module, torch.cat([query, key], -1).flatten(0, 1), rows)
        heads = (batch, num_rows, -1, module.head_dim)
        query, key = _residuals(query.view(heads), key.view(heads))
        of_queries, of_keys = mixed.view(heads).split([query.shape[2], key.shape[2]], 2)
        before = _before(module, module.v_proj_delayed(hidden_states).flatten(0, 1), rows)
        value = torch.cat([module.v_proj_current(hidden_states), before.view(batch, num_rows, -1)], -1)
        return of_queries + query, of_keys + key, value.view(heads)

    return forward


def _residuals(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each query's head and its key's, and the mean of these over the queries of a key."""
    groups = query.shape[2] // key.shape[2]
    query = (query + key.repeat_interleave(groups, 2)) * 0.5
    first, *others = query.unflatten(2, (-1, groups)).float().unbind(3)
    return query, (sum(others, start=first) / groups).to(key.dtype)


def _convolved(module: Any, x: Tensor, rows: RecurrentRows) -> Tensor:
    """Convolve x [R, C] with the weights of each channel, and the result with the matrices of each head."""
    by_channel, by_head = module.conv_qk_depthwise, module.conv_qk_grouped
    [width], [num_outer] = by_channel.kernel_size, by_head.kernel_size
    taps = _windows(x, rows, width + num_outer - 1, "conv")
    weight, bias = by_channel.weight[:, 0].float().unbind(1), by_channel.bias.float()
    inner = []
    for lag in reversed(range(num_outer)):  # also of rows before the sequence, where the bias is alone
        total = bias
        for tap in reversed(range(width)):
            total = total + weight[width - 1 - tap] * taps[lag + tap].float()
        inner.append(total.to(x.dtype))
    head_dim, num_heads = by_head.weight.shape[1], by_head.groups
    inputs = torch.stack(inner, -1).view(len(x), num_heads, head_dim * num_outer)
    matrices = by_head.weight.view(num_heads, -1, head_dim * num_outer)
    return torch.matmul(inputs.transpose(0, 1), matrices.mT).transpose(0, 1).flatten(1) + by_head.bias


def _before(module: Any, delayed: Tensor, rows: RecurrentRows) -> Tensor:
    """Return for each row of delayed [R, V] that of the token before; for a first token the projection of zeros."""
    if (bias := module.v_proj_delayed.bias) is None:
        return _windows(delayed, rows, 2, "delayed")[1]
    marked = torch.cat([delayed, delayed.new_ones(len(delayed), 1)], -1)  # zeros: there is no token
    before = _windows(marked, rows, 2, "delayed")[1]
    return torch.where(before[:, -1:] == 0, bias, before[:, :-1])


def _windows(x: Tensor, rows: RecurrentRows, width: int, name: str) -> list[Tensor]:
    """Return the inputs 0, ..., width - 1 rows before each row, and keep the last ones of each sequence."""
    slots = rows.slots(name)
    taps, final = causal_windows(x, rows.cu_seqlens, width, slots)
    rows.leave(name, final)
    return taps


# -- the trial ---------------------------------------------------------------------------------------------------------


@cache
def _is_like(kind: type, own: Forward) -> bool:
    """Return whether a class's forward `own` computes the same for small layers, with biases and without, and with
    padding."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 12, generator=generator, dtype=torch.float32)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    try:
        for has_bias, padding in ((False, None), (True, mask)):
            layer = _small(kind, has_bias, generator)
            with torch.no_grad():
                found, expected = own(layer, hidden, None, padding), _forward_of(layer)(hidden, None, padding)
            if type(found) is not tuple or [t.shape for t in found] != [t.shape for t in expected]:
                return False
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)):
                return False
    except UNLIKE:
        return False
    return True


def _small(kind: Callable[..., nn.Module], has_bias: bool, generator: torch.Generator) -> nn.Module:
    """Make a layer of a class with four heads of queries, two of keys, taps of two sizes, and random parameters."""
    config = SimpleNamespace(
        hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6, attention_bias=has_bias,
        cca_time0=3, cca_time1=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        layer = kind(config, 0).to(torch.float32)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).normal_(generator=generator)
    return layer
