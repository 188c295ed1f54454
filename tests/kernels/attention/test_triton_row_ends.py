"""Tests of Triton attention, interpreted without a GPU, for rows that see keys behind them, as those of an image do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lockstep.kernels.attention.padded import padded_gradients
from lockstep.kernels.attention.step import PagedStep, RowLayout, ScoreRule
from lockstep.kernels.attention.tiles import Sharing, Tiling
from lockstep.kernels.attention.triton_gradients import triton_gradients
from lockstep.kernels.attention.triton_kernels import triton_attention
from lockstep.tests.kernels.attention.test_paged import Cache, of_rows, options, random_rows, starts_of
from lockstep.tests.kernels.attention.test_row_ends import ENDS, LENGTHS, expected_rows


@pytest.mark.parametrize("kind", ["plain", "window", "all"])
def test_rows_see_their_keys_with_the_same_bits_in_every_chunk_and_have_the_gradients(kind: str) -> None:
    query, key, value = random_rows(LENGTHS, (4, 2), (32, 16), torch.float32)
    keywords = {"scale": 0.2, **options(kind, query)}
    rule = ScoreRule(0.2, keywords.get("window"), keywords.get("softcap"))
    terms = (keywords.get("sinks"), keywords.get("bias"))
    layout, tiling = RowLayout(starts_of(LENGTHS), None, None, ENDS), Tiling(rows=16, keys=16, split=32)
    whole = triton_attention(query, key, value, layout, rule, *terms, tiling=tiling)
    torch.testing.assert_close(whole, expected_rows(query, key, value, **keywords), atol=1e-5, rtol=1e-5)
    cache, starts = Cache(LENGTHS, key, value, 16), starts_of(LENGTHS).tolist()
    for work, num_programs in [
        ([(3, 0, 145), (1, 0, 5), (4, 30, 128)], 1),
        ([(2, 20, 33), (3, 141, 142), (0, 0, 1)], 3),
        ([(4, 55, 128)], 2),
    ]:
        rows = torch.cat([torch.arange(starts[s] + a, starts[s] + b) for s, a, b in work])
        plain, own = cache.step(work), of_rows(rows, keywords)
        paged = PagedStep(plain.block_tables, plain.query_start, plain.context_lens, ENDS[rows]).layout
        num_splits = -(-plain.block_tables.shape[1] * 16 // tiling.split)
        sharing = Sharing(num_programs, num_splits) if num_programs > 1 else Sharing(1, 1)
        found = triton_attention(
            query[rows], cache.key, cache.value, paged, rule, own.get("sinks"), own.get("bias"), tiling=tiling,
            sharing=sharing,
        )  # fmt: skip
        assert torch.equal(found, whole[rows])
    grad_out = torch.randn_like(whole)
    mine = triton_gradients(query, key, value, *terms, layout, rule, whole, grad_out)
    theirs = padded_gradients(query, key, value, *terms, layout, rule, grad_out)
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
