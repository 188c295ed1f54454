"""The sequences in one call of a recurrent layer, and the layer's states before and after its rows.

A layer calls `rows_of` with the keywords that its forward received; the functions that it calls find these in its
`LayerCall`. The result is the same kind of value in a rollout
step, in the trainer's forward and in the start-up probe, so a layer has one code for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ....kernels.attention.shared_rows import SharedRows
from ....kernels.recurrent.slots import Slots
from ..layer_probe import LayerProbe
from ..operations.carried import PACKING, SHARED_ROWS, STEP_KEYWORD, told
from ..steps.context import StepContext
from .states import StateShape


class RecurrentRows:
    """The rows of one call, grouped by sequence, and the states of these sequences in this layer."""

    def __init__(self, cu_seqlens: Tensor, layer: int, step: object, shared: SharedRows | None = None) -> None:
        self.cu_seqlens = cu_seqlens  # int32 [S + 1]: sequence s owns the rows from entry s up to entry s + 1
        self._layer, self._step, self._shared = layer, step, shared

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def spread(self, *of_rows: Tensor) -> tuple[Tensor, ...]:
        """Return the values of all sequences, of which `cu_seqlens` tells, from those of the call's rows [R, ...]:
        sequences may have some in common."""
        return of_rows if self._shared is None else tuple(self._shared.spread(tensor) for tensor in of_rows)

    def kept(self, of_sequences: Tensor) -> Tensor:
        """Return the values of the call's rows [R, ...], from those of all sequences."""
        return of_sequences if self._shared is None else self._shared.kept(of_sequences)

    def slots(self, name: str) -> Slots | None:
        """Return the sequences' slots in the pool of an engine step; None in the trainer's forward and the probe."""
        if not isinstance(self._step, StepContext):
            return None
        states = self._step.states
        assert states is not None, "a step of a module with recurrent layers names its slots"
        return Slots(states.tensors[self._layer][name], states.reads, states.writes)

    def leave(self, name: str, final: Tensor) -> None:
        """Write the sequences' states after their rows, [S, *shape], to the pool of an engine step, or else `keep`."""
        if (slots := self.slots(name)) is None:
            self.keep(name, final)
        else:
            slots.pool.index_copy_(0, slots.writes, final)

    def keep(self, name: str, final: Tensor) -> None:
        """Show the sequences' states after their rows, [S, *shape], to the start-up probe only."""
        if isinstance(self._step, LayerProbe):
            self._step.states.setdefault(self._layer, {})[name] = StateShape(tuple(final.shape[1:]), final.dtype)


class LayerCall(threading.local):
    """The call of one layer that runs in this thread."""

    def __init__(self) -> None:
        self.keywords: Mapping[str, object] = {}  # of its forward
        self.num_scans = 0  # so far

    def begin(self, keywords: Mapping[str, object]) -> None:
        """Begin a call with these keywords; end it with none."""
        self.keywords, self.num_scans = keywords, 0

    def next_scan(self) -> str:
        """Return the name of the state of the call's next scan: a layer may have one for each head (Zamba)."""
        self.num_scans += 1
        return "recurrent" if self.num_scans == 1 else f"recurrent {self.num_scans}"


def rows_of(
    module: nn.Module, batch: int, num_rows: int, device: torch.device, named: Mapping[str, object], *,
    spreads: bool = False,
) -> RecurrentRows:  # fmt: skip
    """Return the sequences of a call on [batch, num_rows, ...] hidden states, flattened batch row by batch row.

    module: the layer, with its `layer_idx`. named: the keywords of its forward. In the trainer's forward a sequence is
    a batch row, whose padding is on the right and changes nothing before it, or a part of one packed row
    (`cu_seq_lens_q`). spreads: the caller has `RecurrentRows.spread` give each sequence the rows that it shares with
    others. Raises ValueError for packed sequences in several rows, and for shared rows if it does not.
    """
    named = told(named)
    step, layer = named.get(STEP_KEYWORD), cast(int, module.layer_idx)
    packed, shared = cast(Tensor | None, named.get(PACKING)), cast(SharedRows | None, named.get(SHARED_ROWS))
    if isinstance(step, StepContext):
        return RecurrentRows(step.paged.query_start, layer, step)
    if shared is not None:
        if not spreads:
            raise ValueError(f"{type(module).__name__} has states of its own kind: its sequences cannot share rows")
        return RecurrentRows(shared.starts, layer, step, shared)
    if packed is None:
        ends = torch.arange(0, (batch + 1) * num_rows, num_rows, dtype=torch.int32, device=device)
        return RecurrentRows(ends, layer, step)
    if batch != 1:
        raise ValueError(f"packed sequences (cu_seq_lens_q) stand in one row, not in a batch of {batch}")
    return RecurrentRows(packed.to(device=device, dtype=torch.int32), layer, step)
