"""Causal depthwise convolution over packed sequences, its taps added in a fixed order.

Letters: N rows, S sequences, C channels, W taps.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..layers.activation import silu


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    initial: Tensor | None = None,
    activation: Literal["silu"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each sequence's rows with their predecessors. Reads no length on the host.

    x [N, C]; weight [C, W]; bias [C]; cu_seqlens int32 [S + 1]: the row offsets of the sequences; initial
    [S, W - 1, C]: the inputs before the first row, None for zeros. Returns [N, C], and the last W - 1 inputs of each sequence,
    initial ones included where it is shorter.
    """
    num_rows, num_channels = x.shape
    num_sequences, num_before = len(cu_seqlens) - 1, weight.shape[1] - 1
    if initial is None:
        initial = x.new_zeros(num_sequences, num_before, num_channels)
    # The inputs before each sequence, then all rows: row r of sequence s reads tap j at row r - (W - 1) + j of x, or
    # among the inputs before s.
    source = torch.cat([initial.to(x.dtype).reshape(-1, num_channels), x])
    first_row = num_sequences * num_before
    rows = torch.arange(num_rows, device=x.device)
    starts = cu_seqlens.long()
    owner = torch.searchsorted(starts[1:], rows, right=True)
    place = rows - starts[owner]
    total = torch.zeros(num_rows, num_channels, dtype=torch.float32, device=x.device)
    for tap in range(num_before + 1):
        back = num_before - tap
        index = torch.where(place >= back, first_row + rows - back, owner * num_before + place + tap)
        total = total + source[index].float() * weight[:, tap].float()
    if bias is not None:
        total = total + bias.float()
    out = total.to(x.dtype)
    if activation == "silu":
        out = silu(out)
    steps = torch.arange(num_before, device=x.device)
    place = (starts[1:] - starts[:-1])[:, None] - num_before + steps  # of each kept input in its sequence
    before = torch.arange(num_sequences, device=x.device)[:, None] * num_before + num_before + place
    index = torch.where(place >= 0, first_row + starts[:-1, None] + place, before)
    return out, source[index]
