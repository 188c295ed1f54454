"""Attention within chunks of positions: against sdpa on each chunk; pieces of a step have the bits of packed rows."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels.attention.chunks import chunked_starts, chunked_step, in_blocks
from lockstep.kernels.attention.packed import varlen_attention
from lockstep.kernels.attention.paged import NewRows, PagedStep, paged_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 16
SIZES = [(16, 64), (16, 8), (8, 12), (4, 6), (16, 100)]  # of blocks and of chunks, which may begin inside a block


def rows(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_rows)
    query, key, value = (torch.randn(num_rows, h, WIDTH, dtype=torch.float32) for h in (HEADS, KV_HEADS, KV_HEADS))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def offsets(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def sdpa_by_chunks(query: Tensor, key: Tensor, value: Tensor, lens: list[int], chunk: int) -> Tensor:
    out, begin = [], 0
    for length in lens:
        for first in range(0, length, chunk):
            part = slice(begin + first, begin + min(length, first + chunk))
            heads = [t[part].float().transpose(0, 1)[None] for t in (query, key, value)]
            out.append(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        begin += length
    return torch.cat(out)


@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "chunk"), SIZES)
def test_pieces_of_steps_have_the_bits_of_packed_rows(path, dtype, block_size, chunk):
    lens = [1, 7, chunk, chunk + 1, 3 * chunk + 5]
    starts = offsets(lens)
    query, key, value = rows(int(starts[-1]), dtype)
    options = {"scale": WIDTH**-0.5, "path": path}
    packed = varlen_attention(query, key, value, chunked_starts(starts, chunk, len(query)), **options)
    exact = sdpa_by_chunks(query, key, value, lens, chunk)
    torch.testing.assert_close(packed.float(), exact, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=1e-2)

    widths = [-(-length // block_size) for length in lens]
    ids = iter(torch.randperm(sum(widths)).tolist())
    tables = torch.zeros(len(lens), max(widths), dtype=torch.int32)
    for table, width in zip(tables, widths, strict=True):
        table[:width] = torch.tensor([next(ids) for _ in range(width)])
    key_cache, value_cache = (torch.zeros(sum(widths), block_size, KV_HEADS, WIDTH, dtype=dtype) for _ in "kv")
    found, done, draw = torch.empty_like(packed), [0] * len(lens), random.Random(block_size)
    while any(a < b for a, b in zip(done, lens, strict=True)):
        active = [s for s, length in enumerate(lens) if done[s] < length]
        nums = [min(lens[s] - done[s], draw.choice([1, 1, 3, chunk, 2 * chunk + 1])) for s in active]
        places = [torch.arange(done[s], done[s] + num) for s, num in zip(active, nums, strict=True)]
        index = torch.cat([at + starts[s] for s, at in zip(active, places, strict=True)])
        blocks = [tables[s][at // block_size].long() for s, at in zip(active, places, strict=True)]
        slots = torch.cat(blocks) * block_size + torch.cat(places) % block_size
        for s, num in zip(active, nums, strict=True):
            done[s] += num
        step = PagedStep(tables[active], offsets(nums), torch.tensor([done[s] for s in active]).int())
        cut, size = chunked_step(step, chunk, block_size, sum(nums))
        caches = in_blocks(key_cache, size), in_blocks(value_cache, size)
        new = NewRows(key[index], value[index], slots)
        found[index] = paged_attention(query[index], *caches, cut, new=new, **options)
    assert torch.equal(found, packed)


def test_contexts_up_to_a_chunk_are_left_as_they_are():
    starts = offsets([5, 8])
    assert chunked_starts(starts, 13, 13) is starts
    step = PagedStep(torch.zeros(2, 4, dtype=torch.int32), starts, torch.tensor([16, 8]).int())
    assert chunked_step(step, 64, 16, 13) == (step, 16)
    cut, size = chunked_step(step, 63, 16, 13)
    assert size == 1 and cut is not step


def test_sequences_may_be_empty():
    starts = chunked_starts(torch.tensor([0, 0, 0, 0, 10]).int(), 4, 10)
    assert sorted({*starts.tolist()}) == [0, 4, 8, 10] and (starts.diff() <= 4).all()


def test_a_decode_step_has_a_part_for_each_sequence():
    """Also a recorded one, whose tables are as wide as the longest context: empty parts would cost time."""
    step = PagedStep(torch.arange(8).int().view(2, 4), offsets([1, 1]), torch.tensor([64, 17]).int())
    cut, size = chunked_step(step, 32, 16, 2)
    assert size == 16 and cut.context_lens.tolist() == [32, 17] and cut.query_start.tolist() == [0, 1, 2]
    assert cut.block_tables.tolist() == [[2, 3], [4, 5]]


def test_gradients_are_those_of_attention_on_each_chunk():
    lens, chunk = [3, 9, 25], 8
    starts = offsets(lens)
    inputs = [t.requires_grad_() for t in rows(int(starts[-1]), torch.float32)]
    weight = torch.randn(int(starts[-1]), HEADS, WIDTH, dtype=torch.float32)
    out = varlen_attention(*inputs, chunked_starts(starts, chunk, len(weight)), scale=WIDTH**-0.5)
    found = torch.autograd.grad((out * weight).sum(), inputs)
    expected = torch.autograd.grad((sdpa_by_chunks(*inputs, lens, chunk) * weight).sum(), inputs)
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-4)
