"""Tests of rows that see keys behind them, as those of an image do: values, gradients, and equal bits in every way to
run them.

Dimension letters: H query heads, K KV heads, D key width, E value width.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels.attention.packed import varlen_attention
from lockstep.kernels.attention.paged import AttentionPath, PagedStep, paged_attention
from lockstep.tests.kernels.attention.test_paged import (
    PATHS,
    Cache,
    num_threads,
    of_rows,
    options,
    random_rows,
    reference_rows,
    starts_of,
)

LENGTHS = [1, 5, 40, 150, 200]
# Rows [begin, end) of each sequence that see each other, as those of one image; some cross tiles of 64 keys.
IMAGES = [[(0, 1)], [(0, 5)], [(2, 20), (20, 33)], [(10, 140)], [(0, 30), (60, 128), (130, 200)]]


def ends_of(lengths: list[int], images: list[list[tuple[int, int]]]) -> Tensor:
    """Return the number of keys that each row sees."""
    found = []
    for length, its in zip(lengths, images, strict=True):
        own = list(range(1, length + 1))
        for begin, end in its:
            own[begin:end] = [end] * (end - begin)
        found += own
    return torch.tensor(found, dtype=torch.int32)


ENDS = ends_of(LENGTHS, IMAGES)


def expected_rows(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    parts = []
    for a, b in itertools.pairwise(starts_of(LENGTHS).tolist()):
        own = {**of_rows(slice(a, b), keywords), "row_ends": ENDS[a:b]}
        parts.append(reference_rows([b - a], query[a:b], key[a:b], value[a:b], **own))
    return torch.cat(parts)


def chunks(size: int, length: int, images: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut the rows of a sequence in chunks of about `size` rows, none within an image."""
    cuts = [0]
    while cuts[-1] < length:
        end = min(cuts[-1] + size, length)
        cuts.append(next((last for first, last in images if first < end < last), end))
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "window", "all"])
@pytest.mark.parametrize(("heads", "widths"), [((4, 2), (64, 64)), ((5, 1), (36, 20))])
def test_rows_of_an_image_see_its_end_with_the_same_bits_in_every_chunk_and_batch(
    path: AttentionPath, dtype: torch.dtype, kind: str, heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    query, key, value = random_rows(LENGTHS, heads, widths, dtype)
    keywords = {"scale": widths[0] ** -0.5, **options(kind, query)}
    whole = varlen_attention(query, key, value, starts_of(LENGTHS), row_ends=ENDS, path=path, **keywords)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(whole, expected_rows(query, key, value, **keywords), **tolerance)
    starts = starts_of(LENGTHS).tolist()
    for block_size, size, num_mates, threads in [(16, 1000, 5, 2), (16, 7, 3, 1), (24, 1, 5, 1), (8, 64, 2, 2)]:
        cache, found = Cache(LENGTHS, key, value, block_size), torch.full_like(whole, torch.nan)
        work = [(s, *rows) for s, n in enumerate(LENGTHS) for rows in chunks(size, n, IMAGES[s])]
        for at in range(0, len(work), num_mates):
            mates = work[at : at + num_mates]
            if len({s for s, _, _ in mates}) < len(mates):  # chunks of one sequence are steps of their own
                steps = [[one] for one in mates]
            else:
                steps = [mates]
            for step in steps:
                rows = torch.cat([torch.arange(starts[s] + a, starts[s] + b) for s, a, b in step])
                plain = cache.step(step)
                paged = PagedStep(plain.block_tables, plain.query_start, plain.context_lens, ENDS[rows])
                with num_threads(threads):
                    found[rows] = paged_attention(
                        query[rows], cache.key, cache.value, paged, path=path, **of_rows(rows, keywords)
                    )
        assert torch.equal(found, whole), f"blocks of {block_size}, chunks of {size}, {num_mates} mates"


@pytest.mark.parametrize("path", PATHS)
def test_a_row_has_the_bits_of_a_row_that_sees_as_many_keys_by_its_place(path: AttentionPath) -> None:
    query, key, value = random_rows([90], (4, 2), (64, 64), torch.bfloat16)
    ends = ends_of([90], [[(3, 80)]])
    found = varlen_attention(query, key, value, starts_of([90]), row_ends=ends, scale=0.1, path=path)
    moved = query.clone()
    moved[79] = query[5]
    plain = varlen_attention(moved, key, value, starts_of([90]), scale=0.1, path=path)
    assert torch.equal(found[5], plain[79])
    assert torch.equal(found[:3], plain[:3])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["plain", "window", "all"])
def test_gradients_are_those_of_the_definition(path: AttentionPath, kind: str) -> None:
    inputs = random_rows(LENGTHS, (4, 2), (32, 24), torch.float32)
    keywords = {"scale": 0.2, **options(kind, inputs[0])}
    grads = []
    for compute in (
        lambda *leaves: varlen_attention(*leaves, starts_of(LENGTHS), row_ends=ENDS, path=path, **keywords),
        lambda *leaves: expected_rows(*leaves, **keywords),
    ):
        leaves = [t.clone().requires_grad_() for t in inputs]
        compute(*leaves).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine, exact, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("ends", "why"),
    [([1, 1, 3, 4, 5], "below its own"), ([1, 2, 6, 4, 5], "behind the context"), ([1, 4, 3, 4, 5], "not ascending")],
)
def test_ends_that_do_not_fit_are_refused(path: AttentionPath, ends: list[int], why: str) -> None:
    query, key, value = random_rows([5], (2, 2), (16, 16), torch.float32)
    with pytest.raises(ValueError, match="do not fit the query"):
        varlen_attention(
            query, key, value, starts_of([5]), row_ends=torch.tensor(ends, dtype=torch.int32), scale=0.2, path=path
        )


def test_ends_of_another_kind_are_refused_by_name() -> None:
    query, key, value = random_rows([5], (2, 2), (16, 16), torch.float32)
    for wrong in (torch.arange(1, 6), torch.arange(1, 5).int()):
        with pytest.raises(ValueError, match="row_ends are torch"):
            varlen_attention(query, key, value, starts_of([5]), row_ends=wrong, scale=0.2)
