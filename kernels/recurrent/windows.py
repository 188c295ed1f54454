"""The last inputs of each row of a sequence, for convolutions whose weights differ from row to row.

Every operation is elementwise, or moves rows, so a row's result depends on its own inputs alone, and nothing is read on
the host. Letters: R rows, C channels, w width, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .slots import Slots


def causal_windows(
    x: Tensor, cu_seqlens: Tensor, width: int, slots: Slots | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the inputs 0, 1, ..., w - 1 rows before each row, [R, C] each, and the last w - 1 of each sequence.

    x [R, C]; cu_seqlens: int32 [S + 1], the rows at which sequences start, and their number. The inputs before a
    sequence are its state [w - 1, C] in `slots`, which are only read, or zeros. Differentiable in x. Returns the final
    states [S, w - 1, C].
    """
    starts = cu_seqlens.to(torch.int64)
    heads = torch.arange(len(starts) - 1, device=x.device) if slots is None else slots.heads()
    chains = starts[heads]  # the rows at which the chain of each sequence begins
    rows = torch.arange(len(x), device=x.device)
    owner = (torch.searchsorted(starts, rows, right=True) - 1).clamp(max=len(chains) - 1)
    before = rows - chains[owner]  # rows of its chain before each row
    states = None if slots is None else slots.pool[slots.reads[heads]]  # [S, w - 1, C]

    def earlier(inputs: Tensor, lag: int, offset: Tensor, of_row: Tensor) -> Tensor:
        """Return inputs, and where a chain has fewer rows, those of its state."""
        index = (width - 1 + offset - lag).clamp(0, max(width - 2, 0))
        initial = inputs.new_zeros(()) if states is None else states[of_row, index].to(inputs.dtype)
        return torch.where((offset >= lag)[:, None], inputs, initial)

    taps = [x]
    for lag in range(1, width):
        num_rows = max(len(x) - lag, 0)
        shifted = torch.cat([x.new_zeros(len(x) - num_rows, x.shape[1]), x[:num_rows]])
        taps.append(earlier(shifted, lag, before, owner))
    every, ends = torch.arange(len(chains), device=x.device), starts[1:]
    last = [
        earlier(x.detach()[(ends - back).clamp(min=0)], back, ends - chains, every) for back in range(width - 1, 0, -1)
    ]
    return taps, torch.stack(last, 1) if last else x.new_zeros(len(chains), 0, x.shape[1])
