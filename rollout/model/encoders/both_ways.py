"""The tokens of prompts that see each other both ways, as those of an image do in Gemma 3: blocks of tokens.

A module tells of them by the masks that it makes of the types of tokens (`create_masks_for_generate`, as its forward
does). Only the module's code knows what a type means, so it is asked: for the blocks of a prompt when this is read, and
in each step that has rows of a block, whose types come with the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...media.encoder import ImageEncoder
from ...media.reader import why_no_images
from ..operations.packed_rows import ends_of_blocks
from ..steps.masks import has_blocks

_NAMES = ("mm_token_type_ids", "token_type_ids")


def image_encoder(
    module: PreTrainedModel, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> ImageEncoder | None:
    """Return the encoder of a module; None for one that is not hosted with images. Each rank that shares the module has
    the whole encoder.

    around: puts the numerics around a function.
    """
    if why_no_images(module) is not None:
        return None
    return ImageEncoder(module, around, BothWays.of(module))


class BothWays:
    """The blocks of tokens in the masks of one module. Ask it where the numerics are installed."""

    def __init__(self, module: PreTrainedModel, make: Callable[..., Any], name: str) -> None:
        """Take the function that makes the module's masks, and the name of its types of tokens."""
        self._module, self._make, self.name = module, make, name
        self._inside: int | None = None  # the type of tokens in blocks; the other ones have 0 or 1 too
        self._is_known = False

    @classmethod
    def of(cls, module: PreTrainedModel) -> BothWays | None:
        """Return the blocks of a module; None for one whose masks do not depend on types of tokens."""
        make = getattr(type(module), "create_masks_for_generate", None)
        if make is None:
            return None
        taken = inspect.signature(make).parameters
        forward = inspect.signature(type(module).forward).parameters
        name = next((name for name in _NAMES if name in taken and name in forward), None)
        return None if name is None else cls(module, make, name)

    @property
    def inside(self) -> int | None:
        """The type of tokens in blocks, 0 or 1; None: the module makes no blocks."""
        if not self._is_known:
            found = [kind for kind in (1, 0) if self._blocks(torch.full((1, 3), kind, dtype=torch.int64))]
            if len(found) == 2:
                raise ValueError(f"{type(self._module).__name__} makes blocks of tokens of all types: not supported")
            self._inside, self._is_known = found[0] if found else None, True
        return self._inside

    def blocks(self, types: Tensor) -> list[tuple[int, int]]:
        """Return the blocks [begin, end) of a prompt's tokens with these types, int64 [1, P].

        Raises ValueError where tokens of several images see each other, or where layers have other blocks.
        """
        return [] if self.inside is None else self._blocks(types)

    def types(self, rows: list[int], num_rows: int) -> Tensor:
        """Return types int64 [1, N] with which the module makes a block of these rows."""
        assert self.inside is not None
        types = torch.full((1, num_rows), 1 - self.inside, dtype=torch.int64)
        types[0, rows] = self.inside
        return types.to(self._module.device)

    def _blocks(self, types: Tensor) -> list[tuple[int, int]]:
        module = self._module
        types = types.to(module.device)
        hidden = torch.empty(*types.shape, 0, dtype=module.dtype, device=module.device)
        # No mask, and no cache by its place: its name is another one since transformers 5.24.
        given = (module.config, hidden, None, None)
        masks = self._make(*given, position_ids=None, is_first_iteration=True, **{self.name: types})
        found: dict[tuple[int, ...], None] = {}
        start = torch.tensor([0, types.shape[1]], dtype=torch.int32, device=module.device)
        for mask in masks.values() if isinstance(masks, dict) else [masks]:
            if isinstance(mask, Tensor) and has_blocks(mask):
                found[tuple(ends_of_blocks(mask, start, None).tolist())] = None
        if len(found) > 1:
            raise ValueError(f"{type(module).__name__} has other blocks of tokens in some layers: not supported")
        blocks, begin = [], 0
        for ends in found:
            for row, end in enumerate(ends):
                if row >= begin and end > row + 1:
                    blocks.append((row, end))
                    begin = end
        return blocks
