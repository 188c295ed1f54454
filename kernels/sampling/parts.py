"""Draws from rows whose vocabulary is cut over ranks: a maximum over the parts in place of a gather of the logits.

A score belongs to its token alone, so the best of the parts' best tokens is the row's. The log-probability keeps its
bits where each part begins at a multiple of the blocks in which exponentials are added: then the parts' blocks are
those of the whole row. C++ alone adds so; other paths need whole rows.

Letters: R rows, P parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cpp as native_sampling
from .draws import KEEP_ALL, RowSettings

Gather = Callable[
    [Tensor], Tensor
]  # a rank's tensor, equal in shape on all ranks -> those of all ranks, stacked [P, ...]


@dataclass(frozen=True)
class DrawnRows:
    """R tokens that were drawn from rows of all parts; NaN where logits are broken."""

    token_ids: Tensor  # int64
    logprobs: Tensor  # float32


def serves_parts(part_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this process can draw from parts of this size, in tokens, with equal log-probabilities."""
    return part_size % native_sampling.BLOCK == 0 and native_sampling.serves(
        torch.empty(0, 1, dtype=dtype, device=device)
    )


def keeps_all(settings: RowSettings) -> bool:
    """Return whether no row's filters exclude tokens, except that a row may take its most likely one."""
    is_free = (settings.top_k >= KEEP_ALL) & (settings.top_p >= 1.0) & (settings.min_p <= 0.0)
    return bool((is_free | (settings.top_k == 1)).all())


def draw_parts(logits: Tensor, settings: RowSettings, positions: Tensor, first_id: int, gather: Gather) -> DrawnRows:
    """Draw one token per row, as `draw_tokens` does from the whole rows; the result is the same on every rank.

    logits: [R, V / P] of the tokens from `first_id` on; settings: see `keeps_all`. A collective of the ranks: two small
    gathers.
    """
    largest = gather(logits.amax(-1).float()).amax(0)
    keys, is_greedy = (settings.seeds, positions), settings.top_k == 1
    mine = native_sampling.draw_parts(logits, settings.temperatures, keys, is_greedy, largest, first_id)
    parts = gather(mine)
    # Parts are in the order of their ids, and argmax takes the first of equal values.
    high, low = parts[..., 0], parts[..., 1]
    low = low.masked_fill(high < high.amax(0), -torch.inf)
    best = parts.gather(0, low.argmax(0).expand(1, -1).unsqueeze(-1).expand(1, -1, parts.shape[-1]))[0]
    blocks = parts[..., 4:].transpose(0, 1).flatten(1)
    logprobs = native_sampling.logprobs_of_parts(blocks, largest, best[:, 3].float(), settings.temperatures)
    is_broken = logprobs.isnan()
    token_ids = best[:, 2].long().masked_fill(is_broken, 0)
    return DrawnRows(token_ids, logprobs)
