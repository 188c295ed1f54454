"""The memory of recorded decode steps: inputs, the buffers that records read and write, and a step's results.

Letters: M rows of the largest size, W blocks of the longest table, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.draws import RowSettings
from ..sequences.block_tables import OwnBlocks

Drawn = tuple[list[int], list[float]]  # the tokens that a step has drawn, by row, and their log-probabilities


@dataclass(frozen=True)
class DecodeInputs:
    """The inputs of one decode step on the host, one row a sequence."""

    token_ids: np.ndarray  # int64 [n]; not read if `sources` is given
    positions: np.ndarray  # int64 [n]
    slots: np.ndarray  # int64 [n]
    block_tables: np.ndarray  # int32 [n, up to W]
    settings: RowSettings | None  # on the host; None: the drawn tokens are not read
    sources: np.ndarray | None = None  # int64 [n]: rows of the step before, whose drawn tokens are these rows' inputs
    states: np.ndarray | None = None  # int64 [2, n]: slots that the rows' sequences read and write, if there are any
    rotary: np.ndarray | None = None  # int64 [n]: positions of the module's rotary; None: the same


class DecodeRows(NamedTuple):
    """The inputs of one decode step as lists, for a CPU: few numbers, which go to the buffers one by one."""

    token_ids: list[int]
    positions: list[int]
    tables: list[OwnBlocks]  # the blocks of each row's sequence
    settings: RowSettings


@dataclass
class Buffers:
    """The memory that recorded steps read and write. It is allocated once."""

    token_ids: Tensor  # int64 [M]
    positions: Tensor  # int64 [M]
    noise_positions: Tensor  # int64 [M]: positions of the tokens that are drawn
    slots: Tensor  # int64 [M]
    sources: Tensor  # int64 [M]
    context_lens: Tensor  # int32 [M]
    block_tables: Tensor  # int32 [M, W]
    settings: RowSettings
    query_start: Tensor  # int32 [M + 1]: 0, 1, 2, ...
    states: Tensor  # int64 [2, M]
    drawn_ids: Tensor  # int64 [M]
    drawn_logprobs: Tensor  # float32 [M]

    @classmethod
    def make(cls, size: int, width: int, device: torch.device) -> Buffers:
        def zeros(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        settings = RowSettings(
            temperatures=torch.ones(size, dtype=torch.float32, device=device), seeds=zeros(),
            top_k=torch.ones_like(zeros()),
            top_p=torch.ones(size, dtype=torch.float64, device=device), min_p=zeros(torch.float32),
        )  # fmt: skip
        return cls(
            zeros(), zeros(), zeros(), zeros(), zeros(), zeros(torch.int32),
            torch.zeros(size, width, dtype=torch.int32, device=device), settings,
            torch.arange(size + 1, dtype=torch.int32, device=device),
            torch.zeros(2, size, dtype=torch.int64, device=device),
            zeros(), zeros(torch.float32),
        )  # fmt: skip

    def first_settings(self, num_rows: int) -> RowSettings:
        """Slice the settings to the first rows, without a copy."""
        settings = self.settings
        return RowSettings(
            settings.temperatures[:num_rows], settings.seeds[:num_rows], settings.top_k[:num_rows],
            settings.top_p[:num_rows], settings.min_p[:num_rows],
        )  # fmt: skip


@dataclass
class Staging:
    """Host memory for one step's copies to and from the device."""

    numbers: Tensor  # int64 [7, M]: token ids, positions, noise positions, slots, sources, two slots of states
    context_lens: Tensor  # int32 [M]
    block_tables: Tensor  # int32 [M, W]
    drawn_ids: Tensor  # int64 [M]
    drawn_logprobs: Tensor  # float32 [M]
    done: torch.cuda.Event | None  # the step that used it last

    @classmethod
    def make(cls, size: int, width: int, is_cuda: bool) -> Staging:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=is_cuda)

        return cls(
            zeros(7, size), zeros(size, dtype=torch.int32), zeros(size, width, dtype=torch.int32),
            zeros(size), zeros(size, dtype=torch.float32), torch.cuda.Event() if is_cuda else None,
        )  # fmt: skip

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class HostViews:
    """The buffers of a CPU as sequences of numbers, which take and give single ones at little cost."""

    def __init__(self, buffers: Buffers) -> None:
        def view(tensor: Tensor) -> memoryview:
            return memoryview(tensor.numpy())

        self.token_ids, self.slots = view(buffers.token_ids), view(buffers.slots)
        self.positions, self.noise_positions = view(buffers.positions), view(buffers.noise_positions)
        self.context_lens = view(buffers.context_lens)
        self.drawn_ids, self.drawn_logprobs = view(buffers.drawn_ids), view(buffers.drawn_logprobs)
        self.block_tables = buffers.block_tables.numpy()

    def drawn(self, num_rows: int) -> Drawn:
        """Return the tokens that the first rows have drawn, and their log-probabilities."""
        logprobs: list[float] = self.drawn_logprobs[:num_rows].tolist()  # type: ignore[assignment]  # a view of floats
        return self.drawn_ids[:num_rows].tolist(), logprobs

    def advance(self, num_rows: int, size: int, block_size: int, padding: int) -> None:
        """Move each of the first rows to the token that it has drawn, which follows its present one, and the rows
        behind them, up to `size`, with the row that pads."""
        for row in range(size):
            is_own = row < num_rows
            source, position = (row, self.positions[row] + 1) if is_own else (padding, self.positions[padding])
            self.token_ids[row], self.positions[row] = self.drawn_ids[source], position
            self.noise_positions[row] = self.context_lens[row] = position + 1
            block, offset = divmod(position, block_size)
            self.slots[row] = self.block_tables.item(row, block) * block_size + offset


class DecodedStep:
    """A decode step in the device's queue."""

    def __init__(self, num_rows: int, logits: Tensor, staging: Staging) -> None:
        self.num_rows = num_rows
        self.logits = logits  # [n, V], until the next step runs
        self._staging = staging

    def wait(self) -> None:
        """Return once the step has run."""
        self._staging.wait()

    def drawn(self) -> Drawn:
        """Wait for the step and return its tokens and their log-probabilities. Call it before two further steps run."""
        self.wait()
        staging, n = self._staging, self.num_rows
        return staging.drawn_ids[:n].tolist(), staging.drawn_logprobs[:n].tolist()
