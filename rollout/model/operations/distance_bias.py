"""Attention whose rows add to the score of a key what they have learnt for its distance (Inkling).

A part of such an attention mixes profiles of distances by each row's states, and spreads the result over the keys of
the cache. Here it stays by distance, [B, H, T, R], and the hosted attention looks it up for the keys that a row sees.
The part is recognised by its results, not by its name. It is given the states and the positions of queries and keys,
or it makes the states itself and is given hidden states, distances and positions (Inkling 2 since transformers 5.24).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .copied_code import innermost, with_names

DISTANCE_BIAS = "lockstep_distance_bias"  # attribute of an attention with such a part: the distances that it reaches

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

_NUM_HEADS, _NUM_QUERIES, _NUM_KEYS = 3, 5, 11
# Errors that code of another form raises on the trial. It then counts as not recognised.
_UNLIKE = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)


def distance_bias_forward(module: nn.Module) -> Forward | None:
    """Return the forward of a part that gives [B, H, T, R] by distance; None for any other module."""
    profiles = list(module.named_parameters(recurse=False))
    if len(profiles) != 1 or profiles[0][1].dim() != 2:
        return None
    code = innermost(type(module).forward)
    if code is None or len(inspect.signature(code).parameters) != 4:
        return None
    name, width = profiles[0][0], profiles[0][1].shape[0]
    layers = _layers_of(module, width)
    if layers is None and any(True for _ in module.children()):
        return None

    def forward(states: Tensor, _: Tensor, positions: Tensor) -> Tensor:
        # states [B, T, H, width], or hidden ones [B, T, C] with positions [B, T] where the part makes the states
        if layers is not None:
            projection, norm = layers
            states = norm(projection(states).unflatten(-1, (-1, width)), positions)
        return (states @ getattr(module, name)).transpose(1, 2)

    return forward if _is_like(module, forward, width, layers and layers[0]) else None


def reach_of(module: nn.Module) -> int | None:
    """Return the distances that such a part of an attention reaches; None for any other module."""
    for part in module.children():
        if distance_bias_forward(part) is not None:
            return next(part.parameters(recurse=False)).shape[1]
    return None


def without_distances(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a model that gives its layers an empty tensor for the distances between all rows, [T, T],
    which parts that stay by distance do not read; None for any other module."""
    code = innermost(type(module).forward)
    if code is None:
        return None
    found = [name for name in code.__code__.co_names if _gives_distances(code.__globals__.get(name))]
    if not found or all(reach_of(part) is None for part in module.modules()):
        return None
    copy = with_names(type(module).forward, dict.fromkeys(found, _no_distances))
    return copy and types.MethodType(copy, module)


def _no_distances(inputs_embeds: Tensor, *_: object, **__: object) -> Tensor:
    return inputs_embeds.new_empty((0, 0), dtype=torch.int64)


def _gives_distances(function: object) -> bool:
    """Return whether a function gives the distances between the rows of a forward without a cache, in all layers."""
    if not inspect.isfunction(function):
        return False
    if list(inspect.signature(function).parameters) != ["inputs_embeds", "cache", "is_sliding"]:
        return False
    rows = torch.arange(4)
    try:
        given = [function(torch.zeros(1, 4, 1, dtype=torch.float32), None, is_sliding) for is_sliding in (False, True)]
    except _UNLIKE:
        return False
    return all(isinstance(one, Tensor) and torch.equal(one, rows[:, None] - rows) for one in given)


def _layers_of(module: nn.Module, width: int) -> tuple[nn.Linear, nn.Module] | None:
    """Return the projection and the norm by which a part makes states of a width; None where it has no such layers."""
    children = list(module.children())
    linear = [child for child in children if type(child) is nn.Linear and child.out_features % width == 0]
    norms = [child for child in children if type(child) is not nn.Linear]
    return (linear[0], norms[0]) if len(linear) == len(norms) == 1 else None


class _Both(nn.Module):
    """A part, and the forward that shall take its place: a trial gives both the same parameters."""

    def __init__(self, part: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.part, self._forward = part, forward

    def forward(self, states: Tensor, queries: Tensor, keys: Tensor, makes_states: bool) -> tuple[Tensor, Tensor]:
        """Return what the part spreads over the keys, and what its place keeps by distance."""
        second, third = (queries[:, None] - keys, queries[None]) if makes_states else (queries, keys)
        return self.part(states, second, third), self._forward(states, second, third)


def _is_like(module: nn.Module, forward: Forward, width: int, projection: nn.Linear | None) -> bool:
    """Return whether the module spreads rows' mixed profiles over keys by their distance, and 0 beyond the profiles."""
    reach, device = next(module.parameters(recurse=False)).shape[1], next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)

    rows = (_NUM_HEADS, width) if projection is None else (projection.in_features,)
    states = drawn(1, _NUM_QUERIES, *rows)
    trial = {f"part.{name}": drawn(*parameter.shape) for name, parameter in module.named_parameters()}
    keys = torch.arange(_NUM_KEYS, device=device) * max(1, reach // 4)  # some of them beyond the reach
    queries = keys[-_NUM_QUERIES:] + 1
    try:
        with torch.no_grad():
            call = (states, queries, keys, projection is not None)
            found, mixed = torch.func.functional_call(_Both(module, forward), trial, call)
            distance = (queries[:, None] - keys).expand(*mixed.shape[:2], -1, -1)
            expected = mixed.gather(3, distance.clamp(0, reach - 1))
    except _UNLIKE:
        return False
    expected = expected.masked_fill((distance < 0) | (distance >= reach), 0)
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)
