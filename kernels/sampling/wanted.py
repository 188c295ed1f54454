"""The logits that rows are drawn from, where these are not the model's: reshaped ones, and masks of allowed tokens.

Letters: R rows, V vocabulary, M rows with a mask, B bytes of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wanted_logits(
    logits: Tensor, reshaped: tuple[Tensor, Tensor] | None, allowed: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the logits [R, V] to draw from, in float32: see `draw_tokens`. Changes nothing; copies if it must."""
    if reshaped is None and allowed is None:
        return logits.float()
    wanted = logits.to(torch.float32, copy=True)
    if reshaped is not None:
        wanted.index_copy_(0, reshaped[0], reshaped[1].float())
    if allowed is not None:
        rows, masks = allowed
        permitted = _unpacked(masks, wanted.shape[1])
        wanted.index_copy_(0, rows, wanted[rows].masked_fill_(~permitted, -torch.inf))
    return wanted


def _unpacked(masks: Tensor, vocab_size: int) -> Tensor:
    """Unpack uint8 [M, B] of bits, the lowest first -> bool [M, V]; False after the last bit."""
    bits = (masks.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    bits = bits.flatten(1)[:, :vocab_size].bool()
    return torch.nn.functional.pad(bits, (0, vocab_size - bits.shape[1]))
