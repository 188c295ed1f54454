"""Tests of kernels that find no memory for their scratch: a MemoryError, after which the process goes on."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from lockstep.kernels.attention.paged import PagedStep, paged_attention
from lockstep.kernels.attention.selection import IndexQueries, _select_native
from lockstep.kernels.attention.step import RowLayout
from lockstep.kernels.linear import linear
from lockstep.kernels.linear.grouped import grouped_products
from lockstep.kernels.machine import native
from lockstep.kernels.recurrent.delta_rule import gated_delta_rule
from lockstep.kernels.sampling.draws import RowSettings, draw_tokens

pytestmark = pytest.mark.skipif(native.load(linear.SOURCE) is None, reason="needs a C++ compiler")
Call = Callable[[], object]


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Refuse this process more addresses than it has now. The scratch asked for is larger than the free pieces of its
    heap: some hundred MiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _linear(size: int) -> Call:
    """Products of an instruction set without bfloat16, whose rows are widened first."""
    library = native.build(native.KERNELS / linear.SOURCE, {**os.environ, "LOCKSTEP_MAX_ISA": "avx2"})
    x, weight = torch.zeros(64, size << 6, dtype=torch.bfloat16), torch.zeros(16, size << 6, dtype=torch.bfloat16)
    return partial(linear.native_products, x, [(weight, None)], entry=linear.entry_point(library))


def _grouped(size: int) -> Call:
    x, weights = torch.zeros(size, 4096), torch.zeros(1, 16, 4096)
    return partial(grouped_products, x, torch.zeros(size, dtype=torch.int64), weights)


def _attention(size: int) -> Call:
    """Attention of samples of one prompt, whose states in its beginning are kept."""
    num = size << 2
    keys, values = torch.zeros(2, 64, 1, 16), torch.zeros(2, 64, 1, 1)
    tables = torch.tensor([[0, 1]], dtype=torch.int32).expand(num, 2).contiguous()
    step = PagedStep(tables, torch.arange(num + 1, dtype=torch.int32), torch.full((num,), 66, dtype=torch.int32))
    return partial(paged_attention, torch.zeros(num, 16, 16), keys, values, step, scale=1.0, path="native")


def _selection(size: int) -> Call:
    num_keys = size << 9
    keys = torch.zeros(1, num_keys, 1)
    starts, contexts = torch.tensor([0, 8, 16], dtype=torch.int32), torch.full((2,), num_keys, dtype=torch.int32)
    layout = RowLayout(starts, contexts, torch.zeros(2, 1, dtype=torch.int32))
    asked = IndexQueries(torch.zeros(16, 1, 1), torch.zeros(16, 1), 1.0, 4)
    return partial(_select_native, asked, keys, layout, None, None)


def _recurrence(size: int) -> Call:
    K = size << 6
    q, v, ends = torch.zeros(2, 1, K), torch.zeros(2, 1, 1), torch.tensor([0, 2])
    return partial(gated_delta_rule, q, q, v, torch.zeros(2, 1), torch.zeros(2, 1), ends)


def _draws(size: int) -> Call:
    num = size << 8
    settings = RowSettings(
        torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.full((1,), num - 1), torch.full((1,), 0.9).double(),
        torch.zeros(1),
    )  # fmt: skip
    return partial(draw_tokens, torch.zeros(1, num), settings, torch.zeros(1, dtype=torch.int64))


KERNELS = [_linear, _grouped, _attention, _selection, _recurrence, _draws]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__[1:])
def test_a_kernel_without_memory_for_its_scratch_is_an_error_and_not_the_end(
    kernel: Callable[[int], Call], threads: int, restore_threads: None
) -> None:
    torch.set_num_threads(threads)
    small, large = kernel(64), kernel(1 << 15)
    small()  # threads have started
    with no_more_memory(), pytest.raises(MemoryError, match="finds no memory for its scratch"):
        large()
    small()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_large_scratch_is_given_back_with_its_call():
    size = 12288
    call = _grouped(size)  # whose copy of x is 192 MiB
    before = _resident_bytes()
    call()
    assert _resident_bytes() - before < size * 4096 * 4 / 2


def test_rows_beside_those_that_share_a_beginning_take_no_memory_for_its_states():
    heads, width, num_prompts = 32, 128, 256
    rows = torch.tensor([0, 1, 1] + [16] * num_prompts).cumsum(0).to(torch.int32)
    tables = torch.zeros(num_prompts + 2, 5, dtype=torch.int32)
    tables[:2] = torch.arange(5)
    step = PagedStep(tables, rows, torch.tensor([70, 70] + [16] * num_prompts, dtype=torch.int32))
    keys = torch.zeros(8, 16, 2, width)
    query = torch.zeros(int(rows[-1]), heads, width)
    before = _resident_bytes()
    out = paged_attention(query, keys, keys, step, scale=1.0, path="native")
    assert _resident_bytes() - before < out.nbytes + query.nbytes / 2
