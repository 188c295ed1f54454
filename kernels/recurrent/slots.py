"""States of sequences in slots of a pool, which a kernel reads and writes in place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """The slots of the sequences of one call. No slot is both read and written."""

    pool: Tensor  # [N, *shape], contiguous
    reads: Tensor  # int64 [S]: the slot with each sequence's state before its rows
    writes: Tensor  # int64 [S]: the slot that gets its state after its rows


def state_pointers(before: Slots | Tensor | None, out: Tensor, after: Tensor | None) -> tuple[int | None, ...]:
    """Return the addresses of the states before, the result, the states after, and the slots read and written."""
    if isinstance(before, Slots):
        pool = before.pool.data_ptr()
        return pool, out.data_ptr(), pool, before.reads.data_ptr(), before.writes.data_ptr()
    assert after is not None
    return None if before is None else before.data_ptr(), out.data_ptr(), after.data_ptr(), None, None
