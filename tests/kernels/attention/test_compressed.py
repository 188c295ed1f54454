"""Tests of attention to a window and to compressed entries: the places of a row's keys, in steps and in packed rows."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from lockstep.kernels.attention.compressed import Closings, Places, entry_slots
from lockstep.kernels.attention.paged import AttentionPath, attention_path
from lockstep.kernels.attention.selection import IndexQueries
from lockstep.kernels.attention.step import RowLayout

PATHS: list[AttentionPath] = list(dict.fromkeys([attention_path(torch.device("cpu"), torch.float32), "torch"]))
CONTEXTS, ROWS = [5, 40, 4, 1, 33, 12], [5, 3, 1, 0, 20, 12]  # a step: tokens of each sequence, and how many are new
BLOCK, WINDOW = 16, 7


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def step_layout() -> tuple[RowLayout, list[list[int]]]:
    """Return a step whose sequences lie in shuffled blocks, and the slots of each sequence's positions."""
    ids, tables = list(range(20)), []
    random.Random(3).shuffle(ids)
    for context in CONTEXTS:
        tables.append([ids.pop() for _ in range(-(-context // BLOCK))])
    slots = [
        [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(n)] for table, n in zip(tables, CONTEXTS, strict=True)
    ]
    padded = torch.tensor([table + [0] * (3 - len(table)) for table in tables], dtype=torch.int32)
    return RowLayout(starts_of(ROWS), torch.tensor(CONTEXTS, dtype=torch.int32), padded), slots


def packed_layout() -> tuple[RowLayout, list[list[int]]]:
    starts = starts_of(CONTEXTS).tolist()
    return RowLayout(starts_of(CONTEXTS), None, None), [[*range(a, b)] for a, b in itertools.pairwise(starts)]


def rows_of(layout: RowLayout) -> list[tuple[int, int]]:
    """Return the sequence and the position of each row."""
    counts = ROWS if layout.context_lens is not None else CONTEXTS
    return [
        (s, CONTEXTS[s] - count + row) for s, count in enumerate(counts) for row in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("layout_of", [step_layout, packed_layout])
@pytest.mark.parametrize("rate", [1, 4, 6, 50])
def test_closings_are_the_windows_whose_last_token_is_a_row(layout_of, rate: int) -> None:
    layout, _ = layout_of()
    rows = rows_of(layout)
    closings = Closings.of(layout, len(rows), rate)
    expected = [
        (row, s, p // rate) for row, (s, p) in enumerate(rows) if (p + 1) % rate == 0
    ]  # fmt: skip
    real = closings.is_real.tolist()
    found = list(zip(closings.rows.tolist(), closings.owners.tolist(), closings.windows.tolist(), strict=True))
    assert found[: len(expected)] == expected and real == [True] * len(expected) + [False] * (len(real) - len(expected))
    entries = torch.randn(len(real), 3)
    beside = closings.by_row(entries, len(rows))
    for row, _, _ in expected:
        assert torch.equal(beside[row], entries[[e[0] for e in expected].index(row)])
    others = torch.ones(len(rows), dtype=torch.bool)
    others[[row for row, _, _ in expected]] = False
    assert not beside[others].any()


@pytest.mark.parametrize("layout_of", [step_layout, packed_layout])
@pytest.mark.parametrize("rate", [4, 6])
def test_a_row_sees_its_window_and_then_the_entries_that_are_closed(layout_of, rate: int) -> None:
    layout, slots = layout_of()
    rows = rows_of(layout)
    seen = Places.of(layout, len(rows), BLOCK if layout.context_lens is not None else 0).seen(WINDOW, rate, None)
    for row, (s, position) in enumerate(rows):
        tokens = [2 * slots[s][p] for p in range(max(0, position + 1 - WINDOW), position + 1)]
        closers = [2 * slots[s][(w + 1) * rate - 1] + 1 for w in range((position + 1) // rate)]
        assert seen.places[row, : int(seen.counts[row])].tolist() == tokens + closers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout_of", [step_layout, packed_layout])
def test_an_indexer_selects_among_the_closed_entries(layout_of, path: AttentionPath) -> None:
    rate, most, generator = 4, 3, torch.Generator().manual_seed(1)
    layout, slots = layout_of()
    rows, in_step = rows_of(layout), layout.context_lens is not None
    queries = torch.randn(len(rows), 4, 8, generator=generator)
    asked = IndexQueries(queries, torch.rand(len(rows), 4, generator=generator) + 0.5, 0.3, most)
    of_entries = [torch.randn(n // rate, 8, generator=generator) for n in CONTEXTS]
    closings, places = Closings.of(layout, len(rows), rate), Places.of(layout, len(rows), BLOCK if in_step else 0)
    if in_step:
        keys = torch.full((20, BLOCK, 8), 1e3)
        for own, entries in zip(slots, of_entries, strict=True):
            closers = torch.tensor([own[(w + 1) * rate - 1] for w in range(len(entries))], dtype=torch.int64)
            keys.flatten(0, 1)[entry_slots(closers, BLOCK, rate)] = entries
    else:
        keys = torch.cat([*of_entries, torch.full((len(closings.rows) - sum(map(len, of_entries)), 8), 1e3)])
    chosen = places.choose(asked, keys, rate, closings, path)
    seen, of_pools = places.seen(WINDOW, rate, chosen), places.pools(rate, chosen)
    for row, (s, position) in enumerate(rows):
        num_closed = (position + 1) // rate
        scores = torch.relu(queries[row] @ of_entries[s][:num_closed].t() * 0.3) * asked.weight[row][:, None]
        best = sorted(scores.sum(0).topk(min(most, num_closed)).indices.tolist())
        num_tokens = min(position + 1, WINDOW)
        found = seen.places[row, num_tokens : int(seen.counts[row])].tolist()
        assert found == [2 * slots[s][(w + 1) * rate - 1] + 1 for w in best]
        tokens = [*(p for w in best for p in range(w * rate, (w + 1) * rate)), *range(num_closed * rate, position + 1)]
        assert of_pools.places[row, : int(of_pools.counts[row])].tolist() == [slots[s][p] for p in tokens]
