"""Tests of paged and packed attention: bits depend on a row and the keys that it sees alone; values and gradients agree
with the definition.

Dimension letters: H query heads, K KV heads, D key width, E value width.
"""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels.attention.cpp import SOURCE
from lockstep.kernels.attention.packed import varlen_attention
from lockstep.kernels.attention.padded import plan_pieces
from lockstep.kernels.attention.paged import (
    AttentionPath,
    NewRows,
    PagedStep,
    attention_path,
    paged_attention,
    reference_attention,
)
from lockstep.kernels.machine import native
from lockstep.kernels.machine.gpu import why_not_triton
from lockstep.tests.support.covering import covering

PATHS: list[AttentionPath] = ["native", "torch"] if native.load(SOURCE) else ["torch"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "row sinks": {"sinks": "rows"},
    "bias": {"bias": 45},
    "far bias": {"bias": 450, "sinks": "rows"},
    "all": {"window": 70, "softcap": 5.0, "sinks": True, "bias": 90},
}


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run tests with one thread unless they set another count: on a busy machine threads wait for each other."""
    with num_threads(1):
        yield


def random_rows(
    lengths: list[int], heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + heads[0])
    total = sum(lengths)
    shapes = [(total, heads[0], widths[0]), (total, heads[1], widths[0]), (total, heads[1], widths[1])]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def options(kind: str, query: Tensor) -> dict[str, Any]:
    """Return the keywords of a kind; sinks and bias are drawn for the rows of the query."""
    chosen, generator, of_rows = dict(KINDS[kind]), torch.Generator().manual_seed(5), query.shape[:2]
    if sinks := chosen.get("sinks"):
        chosen["sinks"] = torch.randn(of_rows if sinks == "rows" else of_rows[1:], generator=generator)
    if reach := chosen.get("bias"):
        chosen["bias"] = torch.randn(*of_rows, reach, generator=generator).to(query.dtype)
    return chosen


def of_rows(rows: Tensor | slice, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords for some of the rows."""
    of_each = {name: dims for name, dims in (("sinks", 2), ("bias", 3)) if name in keywords}
    its = {name: keywords[name][rows] for name, dims in of_each.items() if keywords[name].dim() == dims}
    return {**keywords, **its}


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


class Cache:
    """Sequences written into shuffled blocks of a cache whose other slots hold garbage."""

    def __init__(self, lengths: list[int], key: Tensor, value: Tensor, block_size: int) -> None:
        self.lengths, self.block_size = lengths, block_size
        num_blocks = [-(-n // block_size) for n in lengths]
        ids = list(range(sum(num_blocks) + 3))
        random.Random(block_size).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(n)] for n in num_blocks]
        self.key = torch.full((sum(num_blocks) + 3, block_size, *key.shape[1:]), 1e4, dtype=key.dtype)
        self.value = torch.full((sum(num_blocks) + 3, block_size, *value.shape[1:]), -1e4, dtype=value.dtype)
        starts = starts_of(lengths).tolist()
        for table, start, length in zip(self.tables, starts, lengths, strict=False):
            position = torch.arange(length)
            slot = torch.tensor(table)[position // block_size], position % block_size
            self.key[slot], self.value[slot] = key[start : start + length], value[start : start + length]

    def step(self, work: list[tuple[int, int, int]]) -> PagedStep:
        """Build a step with rows [begin, end) of each of these sequences."""
        width = max(len(table) for table in self.tables)
        tables = [self.tables[s] + [0] * (width - len(self.tables[s])) for s, _, _ in work]
        contexts = [end for _, _, end in work]
        return PagedStep(
            torch.tensor(tables, dtype=torch.int32),
            starts_of([end - begin for _, begin, end in work]),
            torch.tensor(contexts, dtype=torch.int32),
        )

    def attend(self, query: Tensor, chunk: int, num_mates: int, **keywords: Any) -> Tensor:
        """Attend to every row once, `chunk` rows of `num_mates` sequences at a time; rows as in `query`."""
        starts = starts_of(self.lengths).tolist()
        out = torch.full((*query.shape[:2], self.value.shape[-1]), torch.nan, dtype=query.dtype)
        chunks = [
            [(s, begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]
            for s, length in enumerate(self.lengths)
        ]
        waiting = list(range(len(chunks)))
        while waiting:
            batch = waiting[:num_mates]
            waiting = waiting[num_mates:]
            work = [chunks[s].pop(0) for s in batch]
            waiting += [s for s in batch if chunks[s]]
            rows = torch.cat([torch.arange(starts[s] + begin, starts[s] + end) for s, begin, end in work])
            its = of_rows(rows, keywords)
            out[rows] = paged_attention(query[rows], self.key, self.value, self.step(work), **its)
        return out


def reference_rows(lengths: list[int], query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    parts = itertools.pairwise(starts_of(lengths).tolist())
    return torch.cat(
        [reference_attention(query[a:b], key[a:b], value[a:b], **of_rows(slice(a, b), keywords)) for a, b in parts]
    )


HEADS_AND_WIDTHS = [
    ((2, 2), (32, 32)), ((4, 2), (64, 64)), ((6, 2), (80, 48)), ((4, 1), (96, 96)), ((4, 2), (128, 128)),
    ((2, 1), (36, 20)),
]  # fmt: skip
# Native path: all shapes with the two extreme kinds, all kinds with one shape; fewer cases of the slow path.
CASES = [("native", kind, *shape) for shape in HEADS_AND_WIDTHS for kind in ("plain", "all")]
OTHER_KINDS = ("window", "softcap", "sinks", "row sinks", "bias", "far bias")
CASES += [(path, kind, *HEADS_AND_WIDTHS[2]) for kind in OTHER_KINDS for path in PATHS]
CASES += [("torch", "plain", *shape) for shape in HEADS_AND_WIDTHS[1:4]]
CASES += [("torch", "all", *shape) for shape in HEADS_AND_WIDTHS[4:]]


# Each case with one dtype, in turn; the rest are slow.
ROWS = [
    pytest.param(*case, dtype, marks=[pytest.mark.slow] if (number + place) % 2 else [])
    for place, case in enumerate(case for case in CASES if case[0] in PATHS)
    for number, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("path", "kind", "heads", "widths", "dtype"), ROWS)
def test_a_row_has_the_same_bits_in_every_chunk_block_batch_and_thread_count(
    path: AttentionPath, dtype: torch.dtype, kind: str, heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    lengths = [1, 3, 16, 17, 64, 65, 131]
    query, key, value = random_rows(lengths, heads, widths, dtype)
    keywords = {"scale": widths[0] ** -0.5, "path": path, **options(kind, query)}
    whole = varlen_attention(query, key, value, starts_of(lengths), **keywords)
    expected = reference_rows(lengths, query, key, value, **{k: v for k, v in keywords.items() if k != "path"})
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(whole, expected, **tolerance)
    cases = [(16, 1000, 7, 2), (64, 64, 2, 1), (16, 7, 4, 2), (64, 16, 7, 1)]
    if widths == (64, 64):
        cases.append((16, 1, 5, 1))
    for block_size, chunk, num_mates, threads in cases:
        with num_threads(threads):
            found = Cache(lengths, key, value, block_size).attend(query, chunk, num_mates, **keywords)
        assert torch.equal(found, whole), (
            f"blocks of {block_size}, chunks of {chunk}, {num_mates} mates, {threads} threads"
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("heads", "widths"), [((5, 1), (64, 32)), ((20, 1), (256, 40)), ((34, 2), (32, 96))])
@pytest.mark.parametrize("window", [None, 21])
def test_many_heads_on_one_kv_head_and_odd_blocks_keep_their_bits(
    path: AttentionPath, heads: tuple[int, int], widths: tuple[int, int], window: int | None
) -> None:
    lengths = [2, 33, 70]
    query, key, value = random_rows(lengths, heads, widths, torch.bfloat16)
    keywords: dict[str, Any] = {"scale": 0.1, "window": window, "path": path}
    whole = varlen_attention(query, key, value, starts_of(lengths), **keywords)
    expected = reference_rows(lengths, query, key, value, scale=0.1, window=window)
    torch.testing.assert_close(whole, expected, atol=2e-2, rtol=2e-2)
    for block_size, chunk, num_mates in [(1, 11, 3), (5, 1, 2), (8, 3, 3), (32, 70, 1)]:
        found = Cache(lengths, key, value, block_size).attend(query, chunk, num_mates, **keywords)
        assert torch.equal(found, whole), f"blocks of {block_size}, chunks of {chunk}, {num_mates} mates"


@pytest.mark.skipif("native" not in PATHS, reason="there is no native attention here")
def test_natively_what_a_row_does_not_see_may_be_nan() -> None:
    lengths = [5, 50, 97]
    query, key, value = random_rows(lengths, (6, 2), (64, 64), torch.bfloat16)
    whole = varlen_attention(query, key, value, starts_of(lengths), scale=0.2, path="native")
    cache = Cache(lengths, key, value, 16)
    ends, starts = [4, 41, 66], starts_of(lengths).tolist()
    for table, end, length in zip(cache.tables, ends, lengths, strict=True):
        for position in range(end, length):
            cache.key[table[position // 16], position % 16] = torch.nan
            cache.value[table[position // 16], position % 16] = torch.nan
    rows = torch.tensor([start + end - 1 for start, end in zip(starts, ends, strict=False)])
    step = cache.step([(s, end - 1, end) for s, end in enumerate(ends)])
    found = paged_attention(query[rows], cache.key, cache.value, step, scale=0.2, path="native")
    assert torch.equal(found, whole[rows])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_keep_their_bits(path: AttentionPath, dtype: torch.dtype, window: int | None) -> None:
    lengths = [193, 385, 1300]
    query, key, value = random_rows(lengths, (3, 1), (64, 64), dtype)
    keywords: dict[str, Any] = {"scale": 0.125, "window": window, "path": path}
    whole = varlen_attention(query, key, value, starts_of(lengths), **keywords)
    cache = Cache(lengths, key, value, 16)
    assert torch.equal(cache.attend(query, 250, 3, **keywords), whole)
    starts = starts_of(lengths).tolist()
    decoded = [(s, p, p + 1) for s, length in enumerate(lengths) for p in range(s, length, 61)]
    rows = torch.tensor([starts[s] + p for s, p, _ in decoded])
    assert torch.equal(
        paged_attention(query[rows], cache.key, cache.value, cache.step(decoded), **keywords), whole[rows]
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_written_before_they_are_attended_to(path: AttentionPath, dtype: torch.dtype) -> None:
    query, key, value = random_rows([20], (4, 2), (32, 24), dtype)
    caches = [torch.full((4, 16, 2, width), torch.nan).to(dtype) for width in (32, 24)]
    step = PagedStep(torch.tensor([[3, 1]], dtype=torch.int32), starts_of([20]), torch.tensor([20], dtype=torch.int32))
    slots = torch.tensor([*range(48, 64), *range(16, 20)])
    found = paged_attention(query, *caches, step, scale=0.2, path=path, new=NewRows(key, value, slots))
    assert torch.equal(found, varlen_attention(query, key, value, starts_of([20]), scale=0.2, path=path))
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(cache.flatten(0, 1)[slots], rows)
        assert int(cache.isnan().any(-1).any(-1).sum()) == 64 - 20
    unfitting = [(NewRows(key[:3], value, slots), "new key"), (NewRows(key, value, slots.int()), "slots are")]
    for wrong, message in unfitting:
        with pytest.raises(ValueError, match=message):
            paged_attention(query, *caches, step, scale=0.2, path=path, new=wrong)


@covering(
    2, kind=KINDS, dtype=[torch.float32, torch.bfloat16], block_size=[16, 24],
    shapes=[((12, 4), (64, 64)), ((5, 1), (24, 40)), ((4, 4), (32, 32)), ((34, 1), (64, 64))],
)  # fmt: skip
def test_decoding_sequences_that_begin_with_the_same_blocks_have_the_bits_they_have_alone(
    shapes: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype, kind: str, block_size: int
) -> None:
    heads, widths = shapes
    generator = torch.Generator().manual_seed(block_size)
    ids = iter(torch.randperm(400, generator=generator).tolist())
    key, value = (torch.randn(400, block_size, heads[1], w, generator=generator).to(dtype) for w in widths)
    # Positions that a group shares, and the contexts of its sequences; one sequence shares its whole context. Contexts
    # one behind the other that have their blocks in common are the rows of a draft.
    groups = [(240, [241, 250, 420, 300, 263, 240, 500]), (96, [400, 97]), (48, [60, 70]), (0, [1, 333])]
    groups += [(480, [481, 512, 65, 64, 63])]
    sequences, drafts = [], [(240, [range(260, 266), range(262, 263), range(300, 312)]), (0, [range(57, 71)])]
    for shared, contexts in groups:
        beginning = [next(ids) for _ in range(shared // block_size)]
        for context in contexts:
            more = -(-context // block_size) - len(beginning)
            sequences.append((beginning + [next(ids) for _ in range(more)], context))
    for shared, runs in drafts:
        beginning = [next(ids) for _ in range(shared // block_size)]
        for run in runs:
            blocks = beginning + [next(ids) for _ in range(-(-run[-1] // block_size) - len(beginning))]
            sequences += [(blocks[: -(-context // block_size)], context) for context in run]
    query = torch.randn(len(sequences), heads[0], widths[0], generator=generator).to(dtype)
    keywords = {"scale": widths[0] ** -0.5, **options(kind, query)}

    def attend(chosen: list[int]) -> Tensor:
        width = max(len(sequences[i][0]) for i in chosen)
        tables = torch.tensor([sequences[i][0] + [0] * (width - len(sequences[i][0])) for i in chosen])
        contexts = torch.tensor([sequences[i][1] for i in chosen], dtype=torch.int32)
        step = PagedStep(tables.int(), starts_of([1] * len(chosen)), contexts)
        return paged_attention(query[chosen], key, value, step, **of_rows(torch.tensor(chosen), keywords))

    alone = torch.cat([attend([i]) for i in range(len(sequences))])
    mixed = torch.randperm(len(sequences), generator=generator).tolist()
    for threads in (1, 2, 4):
        with num_threads(threads):
            for chosen in (list(range(len(sequences))), mixed, list(range(4, 14))):
                assert torch.equal(attend(chosen), alone[chosen])


@pytest.mark.parametrize("path", PATHS)
def test_strided_views_need_no_copy_and_give_the_same_bits(path: AttentionPath) -> None:
    fused = torch.randn(40, 8, 32)
    query, key, value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    starts = starts_of([11, 29])
    expected = varlen_attention(query.contiguous(), key.contiguous(), value.contiguous(), starts, scale=0.2, path=path)
    assert torch.equal(varlen_attention(query, key, value, starts, scale=0.2, path=path), expected)


@pytest.mark.parametrize("path", PATHS)
def test_extreme_scores_stay_finite_and_right(path: AttentionPath) -> None:
    query, key, value = random_rows([80], (2, 2), (32, 32), torch.float32)
    query = query * 200
    found = varlen_attention(query, key, value, starts_of([80]), scale=1.0, path=path)
    # Scores reach 5000, where one rounding is 5e-4: a softmax may move by that much.
    torch.testing.assert_close(found, reference_attention(query, key, value, scale=1.0), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reach", [45, 450])
def test_a_bias_of_all_rows_has_the_bits_and_gradients_of_one_of_each(path, dtype, reach) -> None:
    lengths = [1, 90, 37, 200]
    inputs = random_rows(lengths, (6, 2), (32, 24), dtype)
    shared = torch.randn(6, reach).to(dtype)
    grads, outs = [], []
    for bias in (shared, shared.expand(len(inputs[0]), 6, reach).contiguous()):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = varlen_attention(*leaves, starts_of(lengths), scale=0.2, window=70, bias=bias, path=path)
        out.float().square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
        outs.append(out)
    assert torch.equal(*outs) and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    cache = Cache(lengths, *inputs[1:], 16)
    for chunk, num_mates in ((200, 4), (1, 2), (33, 3)):
        paged = cache.attend(inputs[0], chunk, num_mates, scale=0.2, window=70, bias=shared, path=path)
        assert torch.equal(paged, outs[0])


@pytest.mark.parametrize("path", PATHS)
def test_no_rows_and_no_sequences_are_fine(path: AttentionPath) -> None:
    query, key, value = torch.zeros(0, 2, 16), torch.zeros(0, 1, 16), torch.zeros(0, 1, 16)
    assert varlen_attention(query, key, value, starts_of([]), scale=1.0, path=path).shape == (0, 2, 16)
    query, key, value = random_rows([5], (2, 1), (16, 16), torch.float32)
    with_empty = varlen_attention(query, key, value, starts_of([0, 5, 0]), scale=1.0, path=path)
    assert torch.equal(with_empty, varlen_attention(query, key, value, starts_of([5]), scale=1.0, path=path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("path", "kind"), [(PATHS[0], kind) for kind in KINDS] + [("torch", "all")])
def test_gradients_are_those_of_the_definition(path: AttentionPath, dtype: torch.dtype, kind: str) -> None:
    lengths, heads = [1, 2, 30, 37, 90], (6, 2)
    inputs = random_rows(lengths, heads, (32, 24), dtype)
    keywords = options(kind, inputs[0])
    names = [name for name in ("sinks", "bias") if name in keywords]
    inputs += [keywords.pop(name).to(dtype) for name in names]
    weights = [torch.randn(sum(lengths), heads[0], 24).to(dtype) for _ in range(2)]

    def gradients(attend: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        every = {**keywords, **dict(zip(names, leaves[3:], strict=True))}
        # Used twice, once of it with swapped rows: gradients must add up, not overwrite.
        first = attend(*leaves[:3], scale=0.2, **every)
        second = attend(leaves[0].flip(-1), *leaves[1:3], scale=0.2, **every)
        ((first * weights[0]).sum() + (second * weights[1]).sum()).backward()
        assert all(leaf.grad is not None and leaf.grad.dtype == dtype for leaf in leaves)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    found = gradients(lambda q, k, v, **kw: varlen_attention(q, k, v, starts_of(lengths), path=path, **kw))
    expected = gradients(lambda q, k, v, **kw: reference_rows(lengths, q, k, v, **kw))
    for mine, theirs in zip(found, expected, strict=True):
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2 * float(theirs.float().abs().max())
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=2e-5 if dtype == torch.float32 else 3e-2)


def test_gradients_of_a_sequence_cut_into_runs_of_rows_add_up() -> None:
    length, heads = 900, (12, 4)
    assert len(list(plan_pieces([length], [length], heads[0], 3, 1 << 21))) > 1
    inputs = random_rows([length], heads, (16, 16), torch.float32)
    mine = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.clone().requires_grad_() for t in inputs]
    both = [torch.randn(length, heads[0], reach).requires_grad_() for reach in (700, 700)]
    both[1].data.copy_(both[0].data)
    mine, theirs = [*mine, both[0]], [*theirs, both[1]]
    varlen_attention(*mine[:3], starts_of([length]), scale=0.25, window=500, bias=both[0]).square().sum().backward()
    reference_attention(*theirs[:3], scale=0.25, window=500, bias=both[1]).square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


def test_the_trainers_forward_has_the_bits_of_the_one_without_gradients() -> None:
    inputs = random_rows([40, 9], (4, 2), (32, 32), torch.bfloat16)
    plain = varlen_attention(*inputs, starts_of([40, 9]), scale=0.2)
    trained = varlen_attention(*[t.clone().requires_grad_() for t in inputs], starts_of([40, 9]), scale=0.2)
    assert trained.requires_grad and torch.equal(plain, trained)


def test_every_row_falls_in_exactly_one_piece_within_the_budget() -> None:
    rows = [1] * 40 + [7, 300, 0, 12, 2000, 33]
    contexts = [n + 5 for n in rows]
    seen = []
    for piece in plan_pieces(rows, contexts, num_heads=8, group=2, budget=1 << 18):
        counts = [min(rows[s] - piece.first_row, piece.num_rows) for s in piece.sequences]
        assert len(counts) * 8 * piece.num_rows * max(contexts[s] for s in piece.sequences) <= 1 << 18
        seen += [(s, piece.first_row + i) for s, n in zip(piece.sequences, counts, strict=True) for i in range(n)]
    assert sorted(seen) == [(s, i) for s, n in enumerate(rows) for i in range(n)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(5, 2, 8)}, "16 and 8 wide"),
        ({"key": torch.zeros(5, 3, 16), "value": torch.zeros(5, 3, 16)}, "4 query heads do not divide"),
        ({"value": torch.zeros(5, 2, 16, dtype=torch.bfloat16)}, "torch.bfloat16"),
        ({"value": torch.zeros(4, 2, 16)}, "5, 5 and 4 rows"),
        ({"query": torch.zeros(5, 4, 32)[..., ::2]}, "query has stride 2"),
        ({"query": torch.zeros(5, 4)}, "2, 3, 3 dimensions"),
        ({"query_start": torch.tensor([0, 5])}, "query_start is torch.int64"),
        ({"query_start": torch.tensor([0, 4], dtype=torch.int32)}, "0 to 4, but the query has 5 rows"),
        ({"query_start": torch.tensor([0, 7, 5], dtype=torch.int32)}, "rows 0 to 7|rows 7 to 5"),
        ({"window": 0}, "window is 0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"sinks": torch.zeros(3)}, r"sinks are \[3\]"),
        ({"sinks": torch.zeros(4, 4)}, r"sinks are \[4, 4\] on cpu, not \[4\] or \[5, 4\]"),
        ({"bias": torch.zeros(5, 4)}, r"bias is torch.float32 \[5, 4\]"),
        ({"bias": torch.zeros(5, 4, 8, dtype=torch.bfloat16)}, "bias is torch.bfloat16"),
        ({"bias": torch.zeros(4, 8, requires_grad=True)}, "or one of all rows without a gradient"),
        ({"bias": torch.zeros(5, 4, 16)[..., ::2]}, r"bias is .*, contiguous"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_what_does_not_fit_is_named(path: AttentionPath, change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "query": torch.zeros(5, 4, 16), "key": torch.zeros(5, 2, 16), "value": torch.zeros(5, 2, 16),
        "query_start": torch.tensor([0, 5], dtype=torch.int32), "scale": 1.0, "path": path,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        varlen_attention(**{**good, **change})


@pytest.mark.parametrize("path", PATHS)
def test_several_faults_are_named_at_once(path: AttentionPath) -> None:
    key = torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match=r"wide.*window.*softcap"):
        varlen_attention(torch.zeros(5, 4, 16), key, key, starts_of([5]), scale=1.0, window=-2, softcap=0.0, path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("tables", "context"), [([[0, 9]], 20), ([[0, -1]], 20), ([[0, 1]], 40), ([[0, 1]], 2)])
def test_a_step_beyond_the_cache_is_refused(path: AttentionPath, tables: list[list[int]], context: int) -> None:
    cache = torch.zeros(4, 16, 1, 16)
    step = PagedStep(
        torch.tensor(tables, dtype=torch.int32), starts_of([3]), torch.tensor([context], dtype=torch.int32)
    )
    with pytest.raises(ValueError, match=f"sequence 0: rows 0 to 3, context {context}, blocks"):
        paged_attention(torch.zeros(3, 2, 16), cache, cache, step, scale=1.0, path=path)


def test_a_step_of_unfitting_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block_tables is torch.int64.*context_lens has 2 dimensions"):
        PagedStep(torch.zeros(1, 1, dtype=torch.int64), starts_of([1]), torch.ones(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="different numbers of sequences"):
        PagedStep(torch.zeros(2, 1, dtype=torch.int32), starts_of([1]), torch.ones(1, dtype=torch.int32))


def test_the_path_is_chosen_by_device_and_dtype() -> None:
    assert attention_path(torch.device("cpu"), torch.float32) == PATHS[0]
    assert attention_path(torch.device("cpu"), torch.float64) == "torch"
    on_a_gpu = "triton" if why_not_triton("cuda") is None else "torch"
    assert attention_path(torch.device("cuda"), torch.bfloat16) == on_a_gpu
    if "native" in PATHS:
        rows = torch.zeros(1, 1, 16, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"not torch\.float64"):
            varlen_attention(rows, rows, rows, starts_of([1]), scale=1.0, path="native")
