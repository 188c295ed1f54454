"""States of sequences in slots of a pool, which a kernel reads and writes in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """The slots of the sequences of one call.

    A sequence that reads the slot that the one before it writes continues it: its rows come after the other's. No other
    slot is both read and written.
    """

    pool: Tensor  # [N, *shape], contiguous
    reads: Tensor  # int64 [S], contiguous: the slot with each sequence's state before its rows
    writes: Tensor  # int64 [S], contiguous: the slot that gets its state after its rows

    def __post_init__(self) -> None:
        """Check what kernels read and write by address. Raises ValueError for another form than the fields'."""
        pool, reads, writes = self.pool, self.reads, self.writes
        if not pool.is_contiguous():
            raise ValueError(f"slots: the pool is not contiguous: {list(pool.shape)} with strides {pool.stride()}")
        for name, numbers in (("reads", reads), ("writes", writes)):
            if numbers.dtype is not torch.int64 or not numbers.is_contiguous():
                raise ValueError(f"slots: {name} are {numbers.dtype} with a stride of {numbers.stride(0)}")
        if len(reads) != len(writes):
            raise ValueError(f"slots: {len(reads)} slots are read, {len(writes)} written")

    def heads(self) -> Tensor:
        """Return for each sequence the first one of its chain, int64 [S]: itself if it continues no other."""
        own = torch.arange(len(self.reads), device=self.reads.device)
        own[1:].masked_fill_(self.reads[1:] == self.writes[:-1], 0)
        return own.cummax(0).values


Compute = Callable[[Sequence[Tensor], Tensor, Tensor], tuple[Tensor, Tensor]]


def run_in_slots(rows: Sequence[Tensor], cu_seqlens: Tensor, slots: Slots, compute: Compute) -> Tensor:
    """Compute a recurrence from states in slots, which it reads and writes in place, with a function that has none.

    rows: [R, ...] each. compute(rows, cu_seqlens, initial [S, ...]) returns the result [R, ...] and the final states.
    Sequences that continue others are computed after these. Returns the result.
    """
    heads = slots.heads().tolist()
    waves: dict[int, list[int]] = {}
    for sequence, head in enumerate(heads):
        waves.setdefault(sequence - head, []).append(sequence)
    starts, parts = cu_seqlens.tolist(), []
    for wave in waves.values():
        index = torch.tensor(
            [row for s in wave for row in range(starts[s], starts[s + 1])],
            dtype=torch.int64, device=cu_seqlens.device,
        )  # fmt: skip
        ends = itertools.accumulate((starts[s + 1] - starts[s] for s in wave), initial=0)
        lengths = torch.tensor(list(ends), dtype=torch.int32, device=cu_seqlens.device)
        initial = slots.pool.index_select(0, slots.reads[wave])
        out, final = compute([t[index] for t in rows], lengths, initial)
        slots.pool.index_copy_(0, slots.writes[wave], final)
        parts.append((index, out))
    result = parts[0][1].new_empty(len(rows[0]), *parts[0][1].shape[1:])
    for index, out in parts:
        result[index] = out
    return result


def state_pointers(before: Slots | Tensor | None, out: Tensor, after: Tensor | None) -> tuple[int | None, ...]:
    """Return the addresses of the states before, the result, the states after, and the slots read and written."""
    if isinstance(before, Slots):
        pool = before.pool.data_ptr()
        return pool, out.data_ptr(), pool, before.reads.data_ptr(), before.writes.data_ptr()
    assert after is not None
    return None if before is None else before.data_ptr(), out.data_ptr(), after.data_ptr(), None, None
