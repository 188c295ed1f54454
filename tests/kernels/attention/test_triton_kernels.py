"""Tests of Triton attention, interpreted without a GPU: values; bits depend on the keys that a row sees alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lockstep.kernels.attention import triton_kernels
from lockstep.kernels.attention.packed import varlen_attention
from lockstep.kernels.attention.paged import attention_path, paged_attention, reference_attention
from lockstep.kernels.attention.step import PagedStep, RowLayout, ScoreRule
from lockstep.kernels.attention.tiles import MAX_PARTIAL_BYTES, Sharing, Tiling, share_splits
from lockstep.kernels.attention.triton_kernels import triton_attention
from lockstep.kernels.machine import gpu as gpu_kernels
from lockstep.kernels.sampling.draws import scaled_logprobs
from lockstep.kernels.self_test import attention_is_invariant, heads_are_independent
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
SMALL = Tiling(rows=16, keys=16, split=32)  # a short context crosses tiles and splits
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 19},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "bias": {"bias": 21, "sinks": "rows"},
    "all": {"window": 37, "softcap": 5.0, "sinks": True, "bias": 45},
}


@dataclasses.dataclass
class Packed:
    """Sequences packed in rows; also written into shuffled blocks of a cache whose other slots hold garbage."""

    lengths: list[int]
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def attend(self, **others: Any) -> Tensor:
        layout = RowLayout(int32(self.starts), None, None)
        return triton_attention(self.query, self.key, self.value, layout, self.rule, *self.terms(), **others)

    @property
    def rule(self) -> ScoreRule:
        return ScoreRule(self.options["scale"], self.options.get("window"), self.options.get("softcap"))

    def terms(self, rows: Tensor | slice = slice(None)) -> tuple[Tensor | None, Tensor | None]:
        """Return the sinks and the bias of some rows."""
        sinks, bias = self.options.get("sinks"), self.options.get("bias")
        of_rows = sinks[rows] if sinks is not None and sinks.dim() == 2 else sinks
        return of_rows, None if bias is None else bias[rows]

    def reference(self) -> Tensor:
        parts = []
        for a, b in itertools.pairwise(self.starts):
            own = dict(zip(("sinks", "bias"), self.terms(slice(a, b)), strict=True))
            parts.append(
                reference_attention(self.query[a:b], self.key[a:b], self.value[a:b], **{**self.options, **own})
            )
        return torch.cat(parts)

    def cache(self, block_size: int) -> tuple[Tensor, Tensor, list[list[int]]]:
        num_blocks = [-(-n // block_size) for n in self.lengths]
        ids = list(range(sum(num_blocks) + 2))
        random.Random(block_size).shuffle(ids)
        tables = [[ids.pop() for _ in range(n)] for n in num_blocks]
        caches = [t.new_full((sum(num_blocks) + 2, block_size, *t.shape[1:]), 1e4) for t in (self.key, self.value)]
        for table, start, length in zip(tables, self.starts, self.lengths, strict=False):
            position = torch.arange(length, device=DEVICE)
            slot = torch.tensor(table, device=DEVICE)[position // block_size], position % block_size
            for cache, rows in zip(caches, (self.key, self.value), strict=True):
                cache[slot] = rows[start : start + length]
        return *caches, tables

    def attend_paged(self, work: list[tuple[int, int, int]], block_size: int, **others: Any) -> tuple[Tensor, Tensor]:
        """Attend to rows [begin, end) of each of these sequences; return their indices and outputs."""
        key, value, tables = self.cache(block_size)
        width = max(map(len, tables)) + 3
        table = int32([tables[s] + [10**6] * (width - len(tables[s])) for s, _, _ in work])
        starts = [0, *itertools.accumulate(end - begin for _, begin, end in work)]
        rows = torch.cat([torch.arange(self.starts[s] + b, self.starts[s] + e, device=DEVICE) for s, b, e in work])
        layout = RowLayout(int32(starts), int32([end for _, _, end in work]), table)
        return rows, triton_attention(self.query[rows], key, value, layout, self.rule, *self.terms(rows), **others)


def int32(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def packed(
    lengths: list[int], heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, kind: str = "plain"
) -> Packed:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    shapes = [(total, heads[0], widths[0]), (total, heads[1], widths[0]), (total, heads[1], widths[1])]
    query, key, value = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    options = {"scale": widths[0] ** -0.5, **KINDS[kind]}
    if "sinks" in options:
        shape = (total, heads[0]) if options["sinks"] == "rows" else heads[:1]
        options["sinks"] = torch.randn(shape, generator=generator).to(DEVICE)
    if "bias" in options:
        options["bias"] = torch.randn(total, heads[0], options["bias"], generator=generator).to(DEVICE, dtype)
    return Packed(lengths, query, key, value, options)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


VALUES = [
    ("plain", (2, 1), (16, 16)), ("all", (6, 2), (36, 20)), ("window", (3, 3), (24, 40)),
    ("softcap", (20, 1), (8, 8)), ("sinks", (4, 2), (32, 32)), ("bias", (4, 2), (16, 16)),
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUICK_VALUES = [(torch.float32, *VALUES[1]), (torch.bfloat16, *VALUES[0])]
SLOW_VALUES = [case for dtype in DTYPES for value in VALUES if (case := (dtype, *value)) not in QUICK_VALUES]


@pytest.mark.parametrize(
    ("dtype", "kind", "heads", "widths"),
    [*QUICK_VALUES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_VALUES)],
)
def test_values_are_those_of_the_definition(
    dtype: torch.dtype, kind: str, heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    case = packed([1, 2, 41], heads, widths, dtype, kind)
    found = case.attend(tiling=SMALL)
    torch.testing.assert_close(found, case.reference(), atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize(
    ("dtype", "kind", "heads"),
    [(torch.float32, "all", (3, 1)),
     pytest.param(torch.bfloat16, "plain", (3, 1), marks=pytest.mark.slow),
     pytest.param(torch.float32, "plain", (4, 2), marks=pytest.mark.slow),
     pytest.param(torch.bfloat16, "all", (4, 2), marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_row_has_the_same_bits_in_chunks_decode_splits_blocks_and_packed(
    dtype: torch.dtype, kind: str, heads: tuple[int, int]
) -> None:
    case = packed([2, 18, 51], heads, (24, 16), dtype, kind)
    whole = case.attend(tiling=SMALL)
    steps = [
        (4, [(1, 10, 18), (0, 1, 2), (2, 29, 51)], Sharing(1, 1)),  # chunks, not at tiles' bounds
        (16, [(2, 50, 51), (1, 17, 18), (0, 1, 2), (2, 31, 32)], Sharing(2, 2)),  # decode, splits shared
        (8, [(0, 1, 2), (2, 50, 51)], Sharing(1, 1)),  # decode, not shared
        (5, [(2, 40, 51)], Sharing(3, 4)),  # a chunk alone, shared by more programs than there are splits
    ]
    for block_size, work, sharing in steps:
        rows, found = case.attend_paged(work, block_size, tiling=SMALL, sharing=sharing)
        assert torch.equal(found, whole[rows]), (block_size, work, sharing)


def test_heads_have_the_same_bits_whichever_stand_beside_them() -> None:
    case = packed([20], (8, 2), (16, 16), torch.float32)
    whole = case.attend(tiling=SMALL)
    for heads in (slice(0, 4), slice(4, 6), slice(7, 8)):
        kv = slice(heads.start // 4, heads.start // 4 + 1)
        part = dataclasses.replace(
            case, query=case.query[:, heads], key=case.key[:, kv].contiguous(), value=case.value[:, kv].contiguous()
        )
        assert torch.equal(part.attend(tiling=SMALL), whole[:, heads])


def test_rows_that_lie_anywhere_in_memory_have_the_same_bits() -> None:
    fused = torch.randn(20, 8, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    query, key, value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    starts = int32([0, 9, 20])
    plain = varlen_attention(*(t.clone() for t in (query, key, value)), starts, scale=0.2, path="triton")
    assert torch.equal(varlen_attention(query, key, value, starts, scale=0.2, path="triton"), plain)
    shifted = torch.cat([torch.zeros(1, device=DEVICE), query.reshape(-1)])[1:].view(20, 4, 24)
    assert torch.equal(varlen_attention(shifted, key, value, starts, scale=0.2, path="triton"), plain)


def test_extreme_scores_stay_finite_and_right() -> None:
    case = packed([40], (2, 2), (16, 16), torch.float32)
    case.query *= 200
    torch.testing.assert_close(case.attend(tiling=SMALL), case.reference(), atol=5e-3, rtol=5e-3)


def test_no_rows_and_no_sequences_are_fine() -> None:
    empty = packed([], (2, 1), (16, 16), torch.float32)
    assert empty.attend().shape == (0, 2, 16)
    case = packed([5], (2, 1), (16, 16), torch.float32)
    with_empty = dataclasses.replace(case, lengths=[0, 5, 0])
    assert torch.equal(with_empty.attend(tiling=SMALL), case.attend(tiling=SMALL))


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_gradients_are_those_of_the_definition(kind: str) -> None:
    case = packed([2, 20], (4, 2), (16, 12), torch.float32, kind)
    sinks = case.options.pop("sinks", None)
    weights = torch.randn(22, 4, 12, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def gradients(is_reference: bool) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (case.query, case.key, case.value, sinks) if t is not None]
        options = {**case.options, "sinks": leaves[3] if len(leaves) == 4 else None}
        if is_reference:
            out = dataclasses.replace(
                case, query=leaves[0], key=leaves[1], value=leaves[2], options=options
            ).reference()
        else:
            out = varlen_attention(*leaves[:3], int32(case.starts), path="triton", **options)
        (out * weights).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    found, expected = gradients(False), gradients(True)
    assert len(found) == (4 if kind == "all" else 3)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_tall_tiles_have_the_bits_of_decode_and_serve_many_rows_only_where_that_was_found(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "_tall", {})
    case, tiles = packed([90, 7], (4, 2), (32, 32), torch.float16, kind), []
    plain = triton_kernels.tiling_of(torch.float16, 32)
    launch = triton_kernels.tall_tiling
    monkeypatch.setattr(triton_kernels, "tall_tiling", lambda tiling: tiles.append(launch(tiling)) or tiles[-1])
    expected = case.attend()
    assert tiles == [], "nobody has compared them here"
    triton_kernels._tall[case.query.device, torch.float16] = True
    assert torch.equal(case.attend(), expected)
    assert tiles == [dataclasses.replace(plain, rows=64, num_stages=2)]
    rows, found = case.attend_paged([(0, 89, 90), (1, 6, 7)], 16)
    assert torch.equal(found, expected[rows]) and len(tiles) == 1, "a decode step has tiles of 16 rows"


@pytest.mark.slow
@pytest.mark.parametrize("differs", [False, True])
def test_the_self_test_compares_tall_tiles(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "_tall", {})
    if differs:  # an accumulation in other steps
        tall = triton_kernels.tall_tiling
        monkeypatch.setattr(triton_kernels, "tall_tiling", lambda tiling: dataclasses.replace(tall(tiling), keys=16))
    assert triton_kernels.use_tall_tiles(torch.float16, DEVICE) is not differs
    assert not triton_kernels.use_tall_tiles(torch.float32, DEVICE)


@pytest.mark.skipif(HAS_GPU, reason="contents are checked on a CPU only")
def test_a_layout_that_does_not_fit_is_named() -> None:
    rows, cache = torch.zeros(2, 2, 16), torch.zeros(3, 4, 1, 16)
    for table, starts, context, message in [
        ([[0, 3]], [0, 2], [6], r"context 6, blocks \[0, 3\]"),
        ([[0, 1]], [0, 2], [9], "sequence 0"),
        ([[0, 1]], [0, 2], [1], "sequence 0"),
        ([[0, 1]], [0, 1], [6], "0 to 1, but the query has 2 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            paged_attention(
                rows, cache, cache, PagedStep(int32(table), int32(starts), int32(context)), scale=1.0, path="triton"
            )


def test_what_is_not_served_is_refused() -> None:
    rows = torch.zeros(2, 2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        varlen_attention(rows.to(DEVICE), rows.to(DEVICE), rows.to(DEVICE), int32([0, 2]), scale=1.0, path="triton")
    rows = torch.zeros(2, 2, 16, device=DEVICE)
    odd = torch.zeros(3, 4, 2, 18, device=DEVICE)[..., :16]
    step = PagedStep(int32([[0]]), int32([0, 2]), int32([2]))
    with pytest.raises(ValueError, match="strides of multiples of 16"):
        paged_attention(rows, odd, odd, step, scale=1.0, path="triton")


def test_a_cpu_is_served_by_other_paths_and_so_is_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_path(torch.device("cpu"), torch.float32) != "triton"
    gpu_kernels.why_not_triton.cache_clear()
    monkeypatch.setenv("LOCKSTEP_TRITON", "0")
    assert attention_path(torch.device("cuda"), torch.bfloat16) == "torch"
    gpu_kernels.why_not_triton.cache_clear()


def test_splits_are_shared_where_rows_are_few_and_within_the_bytes_allowed() -> None:
    assert share_splits(1, 1, 8, 32, 2048) == Sharing(32, 32)  # one long context: all its splits at once
    assert share_splits(64, 64, 512, 32, 1 << 17) == Sharing(4, 32)
    assert share_splits(1024, 1024, 8192, 32, 1 << 21) == Sharing(1, 1)  # enough programs without
    assert share_splits(2048, 2, 1024, 32, 1 << 25) == Sharing(1, 1)  # a prompt
    assert share_splits(64, 64, 512, 1 << 20, MAX_PARTIAL_BYTES >> 18) == Sharing(1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_passes_with_the_tiles_that_gpus_get(dtype: torch.dtype) -> None:
    assert attention_is_invariant("triton", dtype, DEVICE)
    assert heads_are_independent("triton", dtype, DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_contexts_beyond_a_split_keep_their_bits(dtype: torch.dtype, kind: str) -> None:
    case = packed([13, 301], (2, 1), (80, 48), dtype, kind)
    whole = case.attend()
    torch.testing.assert_close(whole, case.reference(), atol=tolerance(dtype), rtol=tolerance(dtype))
    for work in ([(1, 250, 301)], [(1, 300, 301), (0, 12, 13), (1, 255, 256), (1, 256, 257)]):
        rows, found = case.attend_paged(work, 16)
        assert torch.equal(found, whole[rows])


def triton_engine(model: Any, **config: Any) -> Engine:
    settings = {"kv_cache": "32 blocks", "max_num_seqs": 4, "chunked_prefill_size": 17, **config}
    engine = Engine(model.to(DEVICE).train(), EngineConfig(**settings))
    numerics = engine.model.numerics
    numerics.guarantee = dataclasses.replace(numerics.guarantee, attention="triton")
    return engine


def settings_of(num_requests: int, num_new: int) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=num_new, temperature=0.7, sampling_seed=i) for i in range(num_requests)]


@pytest.mark.slow
def test_company_chunks_and_preemption_change_no_bit_of_an_engine_on_this_path(make_model) -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    prompts, settings = [[7] * 20, [(3 * i + 1) % 250 for i in range(33)], [5]], settings_of(3, 18)
    together = triton_engine(model, prefix_cache=False).generate(prompts, settings)
    alone = triton_engine(model, prefix_cache=False, chunked_prefill_size=64)
    scarce = triton_engine(model, kv_cache="6 blocks", admission_ratio=0, chunked_prefill_size=9)
    squeezed = scarce.generate(prompts, settings)
    assert sum(completion.num_retractions for completion in squeezed) >= 1
    for i, completion in enumerate(together):
        [single] = alone.generate(prompts[i], settings[i])
        assert completion.token_ids == single.token_ids == squeezed[i].token_ids
        assert completion.logprobs == single.logprobs == squeezed[i].logprobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("gpt_oss", torch.float32)]
)
def test_an_engine_on_this_path_reports_the_trainers_bits(make_model, family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype, num_hidden_layers=1)
    engine = triton_engine(model)
    prompts = [[5], [(3 * i + 1) % 250 for i in range(41)], [(3 * i + 1) % 250 for i in range(35)]]
    asked = functools.partial(engine.generate, prompts, settings_of(3, 4), options=RequestOptions(logprob_start_len=0))
    missed, hit = asked(), asked()
    for first, completion in zip(missed, hit, strict=True):
        assert (first.token_ids, first.logprobs) == (completion.token_ids, completion.logprobs)
        assert first.prompt_logprobs == completion.prompt_logprobs
        ids = torch.tensor([completion.prompt_ids + completion.token_ids], device=DEVICE)
        with engine.model.training_numerics():
            assert engine.model.module.config._attn_implementation == "lockstep_triton"
            logits = engine.model.module(ids, use_cache=False).logits[0, :-1]
        assert logits.requires_grad
        truth = [None, *scaled_logprobs(logits, 0.7).gather(-1, ids[0, 1:, None])[:, 0].tolist()]
        assert list(completion.logprobs) == truth[completion.num_prompt_tokens :]
        start = completion.num_prompt_tokens - len(completion.prompt_logprobs)
        assert list(completion.prompt_logprobs) == truth[start : completion.num_prompt_tokens]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "widths"), [((32, 8), (128, 128)), ((16, 16), (80, 80)), ((64, 8), (64, 64))])
def test_compiled_rows_have_the_same_bits_and_the_right_values(
    dtype: torch.dtype, kind: str, heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    lengths = [1, 17, 300, 1025, 2300]
    case = packed(lengths, heads, widths, dtype, kind)
    whole = case.attend()
    torch.testing.assert_close(whole, case.reference(), atol=tolerance(dtype), rtol=tolerance(dtype))
    decode = [(s, n - 1, n) for s, n in enumerate(lengths)]
    mixed = [(2, 299, 300), (4, 1000, 1777), (3, 0, 5), (0, 0, 1)]
    for work in (decode, decode[4:], mixed, [(4, p, p + 1) for p in range(0, 2300, 9)]):
        for sharing in (None, Sharing(1, 1), Sharing(3, 10)):
            rows, found = case.attend_paged(work, 16, sharing=sharing)
            assert torch.equal(found, whole[rows]), (work[:4], sharing)


@gpu
@pytest.mark.gpu
def test_a_captured_graph_replays_decode_with_tables_changed_in_place() -> None:
    case = packed([300, 500], (32, 8), (128, 128), torch.bfloat16)
    key, value, tables = case.cache(16)
    rows = torch.tensor([299, 799], device=DEVICE)
    query, width = case.query[rows].clone(), max(map(len, tables))
    table = int32([t + [0] * (width - len(t)) for t in tables])
    step = PagedStep(table, int32([0, 1, 2]), int32([300, 500]))
    attend = functools.partial(paged_attention, query, key, value, step, path="triton", **case.options)
    expected = attend()
    graph = torch.cuda.CUDAGraph()
    step.context_lens.fill_(1)
    with torch.cuda.graph(graph):
        out = attend()
    step.context_lens.copy_(int32([300, 500]))
    graph.replay()
    assert torch.equal(out, expected)
