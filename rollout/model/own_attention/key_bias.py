"""Numbers that a family adds to all scores of a key by its position alone (ALiBi, Press et al. 2022: Bloom and MPT).

Their code numbers the keys of one call. A step's rows belong to several sequences, whose keys are in the cache. What a
softmax makes of such numbers depends on the distance of row and key alone, where they grow by an equal slope from key
to key: so the hosted attention adds slope * -distance, by a table [H, distances] that all rows share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ARGUMENTS = ("alibi", "position_bias")  # names of what such an attention is given
_NUM_TOKENS = 4  # of the trial: few, so that half precisions show how even the numbers are


class KeyBias:
    """The slopes of a model's heads, and their tables."""

    def __init__(self, slopes: Tensor, reach: int) -> None:
        """Take float32 [H], and the distances that a table reaches at first."""
        with torch.inference_mode(False):
            self._slopes, self._reach = slopes.clone(), reach
        self._tables: dict[tuple[float, torch.dtype, int], Tensor] = {}  # kept for good: recorded steps read them

    def table(self, factor: float, dtype: torch.dtype, num_rows: int) -> Tensor:
        """Return [H, R] that is added to scores of keys by their distance, R at least num_rows.

        factor: of the slopes.
        """
        # A trainer's row may be longer than contexts.
        reach = self._reach if num_rows <= self._reach else 1 << (num_rows - 1).bit_length()
        kind = factor, dtype, reach
        if kind not in self._tables:
            with torch.inference_mode(False):  # the trainer's backward pass reads it, too
                distance = torch.arange(reach, dtype=torch.float32, device=self._slopes.device)
                self._tables[kind] = (-factor * self._slopes[:, None] * distance).to(dtype)
        return self._tables[kind]

    def is_like(self, value: Tensor) -> bool:
        """Return whether a tensor has the form of what its model adds: [H or B * H, 1, keys]."""
        return _has_form(value) and value.shape[0] % len(self._slopes) == 0


class _Found(Exception):
    """A trial forward came to its first attention."""


def key_bias_of(root: PreTrainedModel, attention: nn.Module, reach: int) -> KeyBias | None:
    """Return what the attentions of a model get to add to the scores of keys; None if they get nothing of this kind.

    Runs the model's own code on a few tokens, up to its first attention. reach: tokens of its contexts. Raises
    ValueError for numbers that do not grow by an equal slope from key to key.
    """
    names = [name for name in inspect.signature(type(attention).forward).parameters if name in _ARGUMENTS]
    if not names:
        return None
    given: list[object] = []

    def first(*_: Any, **named: Any) -> None:
        given.append(named.get(names[0]))
        raise _Found

    device = next(root.parameters()).device
    with _forward_of(attention, first), torch.no_grad(), suppress(_Found):
        root(torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=device), use_cache=False)
    [numbers] = given or [None]
    if not isinstance(numbers, Tensor) or not _has_form(numbers):
        return None
    wide = numbers[:, 0, -_NUM_TOKENS:].float()
    steps = wide.diff(dim=-1)
    is_last_nearer = bool((wide[:, -1].abs() < wide[:, 0].abs()).all())
    slopes = steps[:, -1 if is_last_nearer else 0]  # where the numbers are small they are exact
    if not torch.allclose(steps, slopes[:, None].expand_as(steps), rtol=2**-5, atol=1e-6):
        raise ValueError(
            f"{type(attention).__name__} adds numbers to scores that do not grow evenly from key to key: not supported"
        )
    return KeyBias(slopes, reach)


def _has_form(value: Tensor) -> bool:
    return value.dim() == 3 and value.shape[1] == 1


class _forward_of:
    """A context in which a part has another forward."""

    def __init__(self, part: nn.Module, forward: Callable[..., None]) -> None:
        self._part, self._forward = part, forward

    def __enter__(self) -> None:
        self._before = vars(self._part).get("forward")
        self._part.forward = self._forward

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del self._part.forward
        else:
            self._part.forward = self._before
