"""Attention whose rows add to the score of a key what they have learnt for its distance (Inkling).

A part of such an attention mixes profiles of distances by each row's states, and spreads the result over the keys of
the cache. Here it stays by distance, [B, H, T, R], and the hosted attention looks it up for the keys that a row sees.
The part is recognised by its results, not by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .copied_code import innermost

DISTANCE_BIAS = "lockstep_distance_bias"  # attribute of an attention with such a part: the distances that it reaches

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

_NUM_HEADS, _NUM_QUERIES, _NUM_KEYS = 3, 5, 11
# Errors that code of another form raises on the trial. It then counts as not recognised.
_UNLIKE = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)


def distance_bias_forward(module: nn.Module) -> Forward | None:
    """Return the forward of a part that gives [B, H, T, R] by distance; None for any other module."""
    parameters = list(module.named_parameters())
    if len(parameters) != 1 or parameters[0][1].dim() != 2 or any(True for _ in module.children()):
        return None
    name, profiles = parameters[0]
    code = innermost(type(module).forward)
    if code is None or len(inspect.signature(code).parameters) != 4 or not _is_like(module, name, profiles):
        return None

    def forward(states: Tensor, _queries: Tensor, _keys: Tensor) -> Tensor:
        return (states @ getattr(module, name)).transpose(1, 2)

    return forward


def reach_of(module: nn.Module) -> int | None:
    """Return the distances that such a part of an attention reaches; None for any other module."""
    for part in module.children():
        if distance_bias_forward(part) is not None:
            return next(part.parameters()).shape[1]
    return None


def _is_like(module: nn.Module, name: str, profiles: Tensor) -> bool:
    """Return whether the module spreads rows' mixed profiles over keys by their distance, and 0 beyond the profiles."""
    (width, reach), device = profiles.shape, profiles.device
    generator = torch.Generator().manual_seed(0)
    states, trial = (
        torch.randn(shape, generator=generator, dtype=torch.float32).to(device)
        for shape in ((1, _NUM_QUERIES, _NUM_HEADS, width), (width, reach))
    )
    keys = torch.arange(_NUM_KEYS, device=device) * max(1, reach // 4)  # some of them beyond the reach
    queries = keys[-_NUM_QUERIES:] + 1
    try:
        with torch.no_grad():
            found = torch.func.functional_call(module, {name: trial}, (states, queries, keys))
    except _UNLIKE:
        return False
    distance = (queries[:, None] - keys).expand(1, _NUM_HEADS, -1, -1)
    mixed = (states @ trial).transpose(1, 2).gather(3, distance.clamp(0, reach - 1))
    expected = mixed.masked_fill((distance < 0) | (distance >= reach), 0)
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)
