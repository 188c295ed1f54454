"""Tests of keys that an indexer selects, and of attention to them: a row's depend on what it sees alone."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from torch import Tensor

from lockstep.kernels.attention import selection
from lockstep.kernels.attention.packed import varlen_attention
from lockstep.kernels.attention.paged import reference_attention
from lockstep.kernels.attention.selected import selected_attention, selected_attention_in_step
from lockstep.kernels.attention.selection import IndexQueries, SelectedKeys, sees_more_than, select_keys
from lockstep.kernels.attention.step import AttentionPath, NewRows, PagedStep, RowLayout
from lockstep.kernels.machine import native

LENGTHS = [37, 1, 90, 12]
MOST = 12
HEADS, WIDTH = 5, 24
NATIVE: list[AttentionPath] = ["native"] if native.load(selection.SOURCE) else []
TRITON: list[AttentionPath] = ["triton"] if importlib.util.find_spec("triton") else []
PATHS: list[AttentionPath] = [*NATIVE, *TRITON, "torch"]
BLOCK = 4


@pytest.fixture(autouse=True)
def one_thread(restore_threads):
    torch.set_num_threads(1)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


class Indexer:
    """What an indexer asks for packed sequences, and the scores by their definition."""

    def __init__(self, dtype: torch.dtype = torch.float32, most: int = MOST, *, ties: bool = False) -> None:
        total = sum(LENGTHS)
        query, self.keys = normal(1, total, HEADS, WIDTH, dtype=dtype), normal(2, total, WIDTH, dtype=dtype)
        weight = normal(3, total, HEADS)
        if ties:  # scores are small whole numbers, and half of them are zero
            query, self.keys, weight = (t.mul(0.7).round() for t in (query, self.keys, weight))
        self.asked = IndexQueries(query.float(), weight, 0.25, most)
        self.layout = RowLayout(offsets(LENGTHS), None, None)

    def expected(self) -> list[list[int]]:
        """Return the selected rows of each row, by a stable sort of scores in float64."""
        found = []
        for start, end in itertools.pairwise(self.layout.query_start.tolist()):
            keys = self.keys[start:end].double()
            for row in range(start, end):
                products = keys[: row - start + 1] @ self.asked.query[row].double().T * self.asked.scale
                scores = (products.relu() * self.asked.weight[row].double()).sum(1)
                best = scores.sort(descending=True, stable=True).indices[: self.asked.most]
                found.append(sorted((best + start).tolist()))
        return found

    def paged(self, starts: list[int], ends: list[int]) -> tuple[IndexQueries, Tensor, RowLayout, Tensor, Tensor]:
        """Return a step over the rows from starts to ends of each sequence: what is asked, a cache that holds earlier
        keys in scattered blocks, its layout, and the rows' own keys with their slots."""
        blocks = [-(-length // BLOCK) for length in LENGTHS]
        ids = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(7))
        tables = torch.zeros(len(LENGTHS), max(blocks), dtype=torch.int32)
        cache = torch.full((sum(blocks) + 2, BLOCK, WIDTH), 1e4, dtype=self.keys.dtype)
        rows, slots, first = [], [], self.layout.query_start.tolist()
        for s, (count, length) in enumerate(zip(blocks, LENGTHS, strict=True)):
            tables[s, :count] = ids[sum(blocks[:s]) : sum(blocks[:s]) + count]
            position = torch.arange(length)
            slot = tables[s].long()[position // BLOCK] * BLOCK + position % BLOCK
            cache.flatten(0, 1)[slot[: starts[s]]] = self.keys[first[s] : first[s] + starts[s]]
            rows.append(torch.arange(first[s] + starts[s], first[s] + ends[s]))
            slots.append(slot[starts[s] : ends[s]])
        of_step, slot = torch.cat(rows), torch.cat(slots)
        step = PagedStep(
            tables, offsets([e - s for s, e in zip(starts, ends, strict=True)]), torch.tensor(ends, dtype=torch.int32)
        )
        asked = IndexQueries(self.asked.query[of_step], self.asked.weight[of_step], self.asked.scale, self.asked.most)
        return asked, cache, step.layout, self.keys[of_step], slot


def listed(selected: SelectedKeys) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(selected.places, selected.counts.tolist(), strict=True)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_highest_scores_are_selected_in_the_order_of_positions(path, dtype):
    indexer = Indexer(dtype)
    selected = select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path)
    assert listed(selected) == indexer.expected()
    assert selected.places.shape == (sum(LENGTHS), MOST)


@pytest.mark.parametrize("path", PATHS)
def test_of_equal_scores_the_earlier_positions_are_selected(path):
    indexer = Indexer(ties=True)
    assert listed(select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path)) == indexer.expected()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_blocks_and_neighbours_change_no_selection(path, dtype):
    indexer = Indexer(dtype)
    whole = listed(select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path))
    first = indexer.layout.query_start.tolist()
    for starts, ends in (([0] * 4, LENGTHS), ([36, 0, 20, 11], LENGTHS), ([5, 0, 7, 0], [9, 1, 8, 0])):
        asked, cache, layout, fresh, slots = indexer.paged(starts, ends)
        found = select_keys(asked, cache, layout, path=path, fresh=fresh, slots=slots)
        assert torch.equal(cache.flatten(0, 1)[slots], fresh)
        rows = [(s, position) for s in range(4) for position in range(starts[s], ends[s])]
        for (s, position), places in zip(rows, listed(found), strict=True):
            table = layout.block_tables[s].tolist()
            expected = [key - first[s] for key in whole[first[s] + position]]
            assert places == [table[key // BLOCK] * BLOCK + key % BLOCK for key in expected]


@pytest.mark.parametrize("path", [*NATIVE, "torch"])
def test_another_default_device_of_the_callers_changes_no_selection(path):
    """Trainers set a GPU, for which meta stands: what is made there by mistake cannot be read."""
    indexer = Indexer()
    with torch.device("meta"):
        selected = select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path)
    assert listed(selected) == indexer.expected()


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
def test_threads_change_no_selection():
    indexer = Indexer()
    one = select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path="native")
    torch.set_num_threads(3)
    three = select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path="native")
    assert listed(one) == listed(three)


@pytest.mark.parametrize("path", PATHS)
def test_a_score_that_is_no_number_is_above_all_others_and_harms_no_other_row(path):
    indexer = Indexer()
    whole = listed(select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path))
    indexer.keys[30] = torch.nan  # of the first sequence
    found = listed(select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path))
    assert all(30 in found[row] for row in range(30, 37))
    assert found[:30] + found[37:] == whole[:30] + whole[37:]


def test_whether_a_row_may_see_more_keys_than_it_selects():
    packed = RowLayout(offsets([3, 12]), None, None)
    assert not sees_more_than(packed, 1, 12) and sees_more_than(packed, 1, 11)
    step = PagedStep(torch.zeros(1, 3, dtype=torch.int32), offsets([1]), torch.tensor([2], dtype=torch.int32))
    assert not sees_more_than(step.layout, 4, 12) and sees_more_than(step.layout, 8, 12)


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
def test_a_layout_that_does_not_fit_is_named():
    indexer = Indexer()
    for layout, says in (
        (RowLayout(offsets([3]), None, None), "query_start runs from 0 to 3, but the query has 140 rows"),
        (RowLayout(offsets([140]), torch.tensor([139], dtype=torch.int32), torch.zeros(1, 40, dtype=torch.int32)),
         "sequence 0: rows 0 to 140, context 139"),
        (RowLayout(offsets([140]), torch.tensor([140], dtype=torch.int32), torch.full((1, 2), 3, dtype=torch.int32)),
         r"blocks \[3, 3\] do not fit"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            select_keys(indexer.asked, torch.zeros(40, 4, WIDTH), layout, path="native")
    asked, cache, layout, fresh, slots = indexer.paged([0] * 4, LENGTHS)
    slots[2] = 10**6
    with pytest.raises(ValueError, match=r"row 2 is to be written at slot 1000000, beyond the cache"):
        select_keys(asked, cache, layout, path="native", fresh=fresh, slots=slots)


# -- attention to selected keys ----------------------------------------------------------------------------------------


def rows_of_attention(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(LENGTHS)
    return (
        normal(4, total, 4, 16, dtype=dtype), normal(5, total, 2, 16, dtype=dtype), normal(6, total, 2, 8, dtype=dtype)
    )  # fmt: skip


def masked(query: Tensor, key: Tensor, value: Tensor, selected: list[list[int]], **options) -> Tensor:
    """Compute each row's attention to its keys by the definition."""
    parts = [
        reference_attention(query[row : row + 1], key[keys], value[keys], **options)
        for row, keys in enumerate(selected)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_attend_to_their_selected_keys_alone_with_the_same_bits_in_a_step(path, dtype):
    indexer, (query, key, value) = Indexer(), rows_of_attention(dtype)
    selected = select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path)
    sinks = normal(8, 4)
    options = {"scale": 0.3, "softcap": 5.0, "sinks": sinks, "path": path}
    out = selected_attention(query, key, value, selected, **options)
    expected = masked(query, key, value, listed(selected), scale=0.3, softcap=5.0, sinks=sinks)
    torch.testing.assert_close(out, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    starts = [30, 0, 64, 0]
    asked, cache, layout, fresh, slots = indexer.paged(starts, LENGTHS)
    of_step = select_keys(asked, cache, layout, path=path, fresh=fresh, slots=slots)
    every, _, _, _, all_slots = indexer.paged([0] * 4, LENGTHS)
    assert len(every.query) == len(all_slots)
    caches = [t.new_full((len(cache), BLOCK, *t.shape[1:]), 1e4) for t in (key, value)]
    for held, rows in zip(caches, (key, value), strict=True):
        held.flatten(0, 1)[all_slots] = rows
    first = indexer.layout.query_start.tolist()
    rows = torch.cat([torch.arange(first[s] + starts[s], first[s + 1]) for s in range(4)])
    new = NewRows(key[rows], value[rows], slots)
    found = selected_attention_in_step(query[rows], *caches, of_step, new=new, **options)
    assert torch.equal(found, out[rows])


@pytest.mark.parametrize("path", PATHS)
def test_with_all_keys_selected_it_is_plain_attention_bit_for_bit(path):
    indexer, rows = Indexer(most=max(LENGTHS)), rows_of_attention()
    selected = select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path)
    out = selected_attention(*rows, selected, scale=0.3, path=path)
    assert torch.equal(out, varlen_attention(*rows, indexer.layout.query_start, scale=0.3, path=path))


@pytest.mark.parametrize("budget", [1 << 22, 1 << 12])
def test_gradients_are_those_of_the_definition(monkeypatch, budget):
    monkeypatch.setattr("lockstep.kernels.attention.selected._BUDGET", budget)
    indexer, sinks = Indexer(), normal(8, 4).requires_grad_()
    rows = [t.requires_grad_() for t in rows_of_attention()]
    path = PATHS[0]
    selected = select_keys(indexer.asked, indexer.keys[:, None], indexer.layout, path=path)
    out = selected_attention(*rows, selected, scale=0.3, softcap=5.0, sinks=sinks, path=path)
    grad = normal(9, *out.shape)
    found = torch.autograd.grad(out, [*rows, sinks], grad)
    wide = [t.detach().double().requires_grad_() for t in (*rows, sinks)]
    plain = masked_double(*wide, listed(selected))
    for mine, theirs in zip(found, torch.autograd.grad(plain, wide, grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=1e-4)


def masked_double(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, selected: list[list[int]]) -> Tensor:
    """Compute attention with softcap and sinks over a mask, in float64."""
    seen = torch.zeros(len(query), len(key), dtype=torch.bool)
    for row, keys in enumerate(selected):
        seen[row, keys] = True
    keys, values = (t.repeat_interleave(2, 1) for t in (key, value))
    scores = 5.0 * torch.tanh(torch.einsum("nhd,lhd->hnl", query, keys) * 0.3 / 5.0)
    scores = scores.masked_fill(~seen, -torch.inf)
    probs = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1).softmax(-1)[..., :-1]
    return torch.einsum("hnl,lhe->nhe", probs, values)
