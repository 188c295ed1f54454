"""The rows of a step that take features of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from .images import ImageRows, Images


class _Share(Protocol):
    """A sequence's share of a step."""

    @property
    def id(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


class _WithImages(Protocol):
    @property
    def images(self) -> Images | None: ...


def image_rows(
    items: Sequence[_Share],
    requests: Mapping[str, _WithImages],
    positions: np.ndarray,
    bounds: np.ndarray,
    device: torch.device,
) -> ImageRows | None:
    """Return the rows of a step that take features of images, and all rotary positions if some are not those of the
    tokens; None where no prompt has images.

    positions: int64 [N] of the tokens; bounds: the first row of each item, and the end.
    """
    if all(requests[item.id].images is None for item in items):
        return None
    found, rotary = ImageRows(), positions
    for item, first, end in zip(items, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if (images := requests[item.id].images) is not None:
            found.add(images, item.start, item.num_tokens, first)
            own = images.rotary_positions(positions[first:end])
            if own.ndim > rotary.ndim:
                rotary = np.broadcast_to(rotary, (len(own), len(positions))).copy()
            rotary[..., first:end] = own
    if rotary is not positions:
        found.positions = torch.from_numpy(rotary)
    return found.to(device)


def moved_rows(positions: np.ndarray, offsets: Sequence[int], device: torch.device) -> ImageRows:
    """Return rows behind images, which take no features of them: int64 [N] positions of tokens, and their offsets."""
    return ImageRows(positions=torch.from_numpy(positions + offsets)).to(device)
