"""Tests of slots of a pool: kernels read their numbers as they lie in memory; sequences without rows."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.recurrent.conv import causal_conv, causal_conv_in_slots
from lockstep.kernels.recurrent.slots import Slots
from lockstep.kernels.recurrent.windows import causal_windows


def test_slots_that_a_kernel_could_not_read_are_refused() -> None:
    pool, numbers = torch.randn(5, 3, 6), torch.tensor([[0, 1], [2, 3]])
    reads, writes = torch.tensor([0, 2]), torch.tensor([1, 3])
    with pytest.raises(ValueError, match=r"reads are torch\.int64 with a stride of 2"):
        Slots(pool, numbers[:, 0], writes)
    with pytest.raises(ValueError, match=r"writes are torch\.int32"):
        Slots(pool, reads, writes.int())
    with pytest.raises(ValueError, match="2 slots are read, 1 written"):
        Slots(pool, reads, writes[:1])
    with pytest.raises(ValueError, match="the pool is not contiguous"):
        Slots(pool.transpose(1, 2), reads, writes)


@pytest.mark.parametrize("lengths", [[0], [0, 0], [2, 0, 3], [2, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sequences_without_rows_keep_their_states(lengths: list[int], dtype: torch.dtype) -> None:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    x, weight, pool = (torch.randn(shape, dtype=dtype) for shape in ((sum(lengths), 6), (6, 4), (9, 3, 6)))
    reads = torch.arange(len(lengths))
    writes = reads + 4
    reads[1:2] = writes[:1]  # continues the one before it
    expected = pool.clone()
    for index, (first, end) in enumerate(zip(ends.tolist(), ends[1:].tolist(), strict=False)):
        own = torch.tensor([0, end - first], dtype=torch.int32)
        expected[writes[index]] = causal_conv(x[first:end], weight, None, own, expected[reads[index]][None])[1][0]
    before = causal_windows(x, ends, 4, Slots(pool, reads, writes))[1]
    causal_conv_in_slots(x, weight, None, ends, Slots(pool, reads, writes))
    assert torch.equal(pool, expected)
    assert torch.equal(before, expected[writes])
