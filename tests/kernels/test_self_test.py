"""Tests of the self-test: it finds products that do not keep a row's bits, and names one to use instead."""

import time

import pytest
import torch
from torch import Tensor

from lockstep.kernels.linear.linear import SOURCE, native_path, row_product
from lockstep.kernels.machine import native
from lockstep.kernels.self_test import (
    MAX_SHAPES,
    MAX_WEIGHTS,
    Candidate,
    Cut,
    default_candidates,
    first_difference,
    representative_shapes,
    self_test,
)

CPU = torch.device("cpu")
SHAPES = [(96, 64), (160, 64), (64, 96), (77, 50)]


def product_that_knows_its_batch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a product that is off by about an ulp where a batch has an odd number of rows above 4."""
    out = row_product(x, weight, bias)
    return out * (1 + 2e-7) if x.shape[0] % 2 and x.shape[0] > 4 else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_machine_at_hand_gets_a_guarantee_and_keeps_it(dtype: torch.dtype) -> None:
    started = time.perf_counter()
    guarantee = self_test(SHAPES, dtype, CPU)
    assert guarantee.invariant and guarantee.linear != "library"
    assert f"{dtype} on cpu" in guarantee.reason and guarantee.linear in guarantee.reason
    assert 0 < guarantee.seconds <= time.perf_counter() - started
    assert self_test(reversed(SHAPES), dtype, CPU) is guarantee


def test_the_answer_is_sought_anew_at_another_thread_count() -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(self_test(SHAPES, torch.float32, CPU))
    finally:
        torch.set_num_threads(before)
    assert found[0] is not found[1]
    assert "1 threads" in found[0].reason and "2 threads" in found[1].reason


def test_a_product_that_is_not_invariant_is_refused_and_the_next_one_taken() -> None:
    bad = Candidate("padded", 4, product_that_knows_its_batch)
    guarantee = self_test(SHAPES, torch.float32, CPU, candidates=[bad, Candidate("rows", 1, row_product)])
    assert guarantee.linear == "rows" and guarantee.invariant
    assert "refused: padded product with rows padded to 4: 5 rows of" in guarantee.reason


def test_no_guarantee_is_claimed_when_everything_fails() -> None:
    bad = Candidate("padded", 4, product_that_knows_its_batch)
    guarantee = self_test(SHAPES, torch.float32, CPU, candidates=[bad])
    assert not guarantee.invariant and guarantee.linear == "library"
    assert "no product is invariant" in guarantee.reason


def test_a_difference_that_only_the_bias_brings_is_found() -> None:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plain = row_product(x, weight, None)
        return plain if bias is None else plain + bias * (1 + x.shape[0] * 1e-6)

    assert first_difference(row_product, [(8, 8)], torch.float32, CPU) is None
    assert first_difference(product, [(8, 8)], torch.float32, CPU) is not None


def test_the_candidates_run_from_fast_to_certain() -> None:
    padded = [("padded", 4), ("padded", 8), ("padded", 16)]
    for dtype in (torch.float32, torch.bfloat16):
        methods = [(c.method, c.row_multiple) for c in default_candidates(CPU, dtype)]
        assert [method for method in methods if method[0] == "padded"] == padded
        assert methods[-1] == ("rows", 1)
        if native.load(SOURCE) is not None:
            leads = native_path(dtype) != "plain"
            assert methods.index(("native", 1)) == (0 if leads else len(padded))
    assert ("native", 1) not in [
        (c.method, c.row_multiple) for c in default_candidates(torch.device("cuda"), torch.float32)
    ]


def test_a_guarantee_names_all_that_ranks_must_choose_alike() -> None:
    guarantee = self_test(SHAPES, torch.bfloat16, CPU)
    path = f" ({native_path(torch.bfloat16)})" if guarantee.linear == "native" else ""
    assert guarantee.choices == (
        f"{guarantee.linear}{path}, rows padded to {guarantee.row_multiple}, {guarantee.attention} attention"
    )


def test_the_shapes_tried_are_few_small_and_hold_both_ends() -> None:
    shapes = [(n, k) for n in (64, 100, 4096, 151_937) for k in (48, 1024, 4096, 14_336)]
    tried = representative_shapes(shapes)
    assert len(tried) == len(set(tried)) == MAX_SHAPES
    assert {min(k for _, k in tried), max(k for _, k in tried)} == {48, 14_336}
    assert all(n * k <= max(MAX_WEIGHTS, 128 * k) for n, k in tried)
    assert any(n % 64 == 151_937 % 64 for n, _ in tried), "a cut layer keeps its edge"
    assert representative_shapes([(10, 20)]) == [(10, 20)]
    assert representative_shapes([]) == []


def test_shapes_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(0, 5\)"):
        self_test([(4, 4), (0, 5)], torch.float32, CPU)


def product_that_knows_the_width(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a product that is invariant in its rows, but off by about an ulp in layers of few columns."""
    return row_product(x, weight, bias) * (1 + 2e-7 * (weight.shape[0] < 64))


def product_that_knows_its_strides(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a product that is invariant in its rows, but off by about an ulp for a view into a wider weight."""
    return row_product(x, weight, bias) * (1 + 2e-7 * (weight.stride(0) > weight.shape[1]))


@pytest.mark.parametrize(
    ("product", "cut", "what"),
    [
        (product_that_knows_the_width, Cut(96, 64, "columns", 2), "columns of rank 0 of 2 differ"),
        (product_that_knows_its_strides, Cut(96, 64, "blocks", 4), "a block of rank 0 of 2 differs"),
    ],
)
def test_a_product_that_a_rank_would_compute_otherwise_is_refused(product, cut: Cut, what: str) -> None:
    candidates = [Candidate("padded", 4, product), Candidate("rows", 1, row_product)]
    assert self_test([(96, 64)], torch.float32, CPU, candidates).linear == "padded"
    guarantee = self_test([(96, 64)], torch.float32, CPU, candidates, cuts=[cut])
    assert guarantee.linear == "rows" and guarantee.invariant and what in guarantee.reason


def test_cuts_are_part_of_what_an_answer_is_remembered_for() -> None:
    cuts = [Cut(96, 64, "columns", 4), Cut(64, 96, "blocks", 4)]
    guarantee = self_test(SHAPES, torch.bfloat16, CPU, cuts=cuts)
    assert "2 cuts of layers" in guarantee.reason and guarantee is self_test(SHAPES, torch.bfloat16, CPU, cuts=cuts)
    assert guarantee is not self_test(SHAPES, torch.bfloat16, CPU)
