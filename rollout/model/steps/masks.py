"""The form of a mask that tells of blocks of tokens which see each other both ways, as those of an image do."""

from __future__ import annotations

import torch
from torch import Tensor


def has_blocks(mask: Tensor) -> bool:
    """Return whether a mask is one of `hosted_mask` with such blocks: int64 [B, 1, 1, T] or, of packed rows,
    [1, 1, T, 1]."""
    return mask.dtype is torch.int64 and mask.dim() == 4
