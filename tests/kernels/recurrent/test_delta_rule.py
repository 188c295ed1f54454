"""Tests of the gated delta rule: values and gradients are those of transformers; bits depend on the sequence alone."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from lockstep.kernels.recurrent.delta_chunks import similar_lengths
from lockstep.kernels.recurrent.delta_rule import (
    DeltaRule,
    gated_delta_rule,
    gated_delta_rule_in_slots,
    reference_gated_delta_rule,
)
from lockstep.kernels.recurrent.slots import Slots
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.support.operations import operations_of

LENGTHS = [1, 70, 5, 130]
KINDS = ("by head", "by channel")


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def operands(rows: int, kind: str, dtype: torch.dtype = torch.float32, value_dim: int = 72) -> list[Tensor]:
    """Return q, k, v, g and beta of 4 heads; by head, each key head serves two of them."""
    keys = 2 if kind == "by head" else 4
    shape = (rows, 4) if kind == "by head" else (rows, 4, 40)
    q, k, v = (torch.randn(rows, heads, size).to(dtype) for heads, size in ((keys, 40), (keys, 40), (4, value_dim)))
    return [q, k, v, -2 * torch.rand(shape) ** 3, torch.rand(rows, 4).to(dtype)]


def transformers_own(kind: str, *tensors: Tensor) -> Tensor:
    if kind == "by head":
        needs_transformers(5, 23)  # an older one repeats the key heads outside this function
    function = torch_chunk_gated_delta_rule if kind == "by head" else chunk_kimi_delta_attention
    q, k, v, g, beta = (t[None] for t in tensors)
    return function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_transformers_and_of_the_reference(kind: str) -> None:
    tensors = operands(sum(LENGTHS), kind)
    out, final = gated_delta_rule(*tensors, starts(LENGTHS))
    for part, *own in zip(out.split(LENGTHS), *(t.split(LENGTHS) for t in tensors), strict=True):
        torch.testing.assert_close(part, transformers_own(kind, *own), atol=2e-6, rtol=1e-5)
    expected = reference_gated_delta_rule(*tensors, None, starts(LENGTHS), DeltaRule(40**-0.5, 1e-6))
    for found, other in zip((out, final), expected, strict=True):
        torch.testing.assert_close(found, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [6, 64, 72])
def test_a_row_has_the_same_bits_for_any_cut_of_its_sequence(kind: str, dtype: torch.dtype, value_dim: int) -> None:
    tensors = operands(130, kind, dtype, value_dim)
    whole, end = gated_delta_rule(*tensors, starts([130]))
    for size in (1, 13, 64, 100):
        parts, state = [], torch.zeros_like(end[0])
        for part in zip(*(t.split(size) for t in tensors), strict=True):
            beside = [torch.cat(both) for both in zip(operands(7, kind, dtype, value_dim), part, strict=True)]
            initial = torch.stack([torch.randn_like(state), state])
            out, final = gated_delta_rule(*beside, starts([7, len(part[0])]), initial)
            parts.append(out[7:])
            state = final[1]
        assert torch.equal(torch.cat(parts), whole), size
        assert torch.equal(state, end[0]), size


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", KINDS)
def test_threads_neighbours_and_places_in_memory_change_no_bit(kind: str) -> None:
    tensors = operands(60, kind)
    whole, _ = gated_delta_rule(*tensors, starts([20, 0, 40]))
    torch.set_num_threads(1)
    q, k, v, g, beta = (t[20:].clone() for t in tensors)
    wide = torch.cat([t.flatten(1) for t in (q, k, v)], 1)  # as a layer's convolution leaves them
    split = [
        t.view(40, -1, d) for t, d in zip(wide.split([t[0].numel() for t in (q, k, v)], 1), (40, 40, 72), strict=True)
    ]
    alone, _ = gated_delta_rule(*split, g, beta, starts([40]))
    assert torch.equal(alone, whole[20:])


def test_an_empty_sequence_keeps_its_state() -> None:
    tensors, initial = operands(3, "by head"), torch.randn(2, 4, 40, 72)
    _, final = gated_delta_rule(*tensors, starts([0, 3]), initial)
    assert torch.equal(final[0], initial[0])


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_are_those_of_its_values(kind: str) -> None:
    ends = starts([5, 0, 19])
    shapes = ((24, 1, 3), (24, 1, 3), (24, 2, 4), (24, 2) if kind == "by head" else (24, 2, 3), (24, 2), (3, 2, 3, 4))
    if kind == "by channel":
        shapes = ((24, 2, 3), (24, 2, 3), *shapes[2:])
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    leaves[3], leaves[4] = -leaves[3].abs(), leaves[4].sigmoid()
    leaves = [t.requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(lambda *t: gated_delta_rule(*t[:5], ends, t[5]), leaves, fast_mode=True)


def gradients(function: object, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    assert callable(function)
    return list(torch.autograd.grad(function(*leaves), leaves, grad.to(leaves[2].dtype)))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_transformers_chunks(kind: str) -> None:
    tensors, grad = operands(150, kind), torch.randn(150, 4, 72)
    own = gradients(lambda *t: gated_delta_rule(*t, starts([150]))[0], tensors, grad)
    expected = gradients(lambda *t: transformers_own(kind, *t), tensors, grad)
    for found, other in zip(own, expected, strict=True):
        assert distance(found, other) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_packed_sequences_are_those_of_each_alone(kind: str) -> None:
    lengths = [20, 1, 70, 17, 0, 130, 20, 69]
    tensors = [t.double() for t in operands(sum(lengths), kind)]
    leaves = [t.requires_grad_() for t in (*tensors, torch.randn(len(lengths), 4, 40, 72, dtype=torch.float64))]
    grads = torch.randn(sum(lengths), 4, 72, dtype=torch.float64), torch.randn_like(leaves[5])
    found = torch.autograd.grad(gated_delta_rule(*leaves[:5], starts(lengths), leaves[5]), leaves, grads)
    rows = zip(*(t.split(lengths) for t in (*leaves[:5], grads[0], *found[:5])), strict=True)
    for index, (q, k, v, g, beta, grad, *mine) in enumerate(rows):
        initial = leaves[5][index : index + 1]
        values = gated_delta_rule(q, k, v, g, beta, starts([len(q)]), initial)
        alone = torch.autograd.grad(values, [q, k, v, g, beta, initial], (grad, grads[1][index : index + 1]))
        for part, other in zip([*mine, found[5][index : index + 1]], alone, strict=True):
            torch.testing.assert_close(part, other)


def test_sequences_that_fill_equal_numbers_of_rows_go_together() -> None:
    assert similar_lengths([20, 1, 70, 17, 0, 130, 32, 69]) == [[5], [2, 7], [6, 0, 3], [1, 4]]
    assert [len(group) for group in similar_lengths([1500, 1510, *[30] * 100])] == [1, 1, 64, 36]
    assert similar_lengths([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_runs_as_many_operations_for_many_sequences_as_for_few(kind: str) -> None:
    counts = []
    for num_sequences in (2, 50):
        leaves = [t.requires_grad_() for t in operands(30 * num_sequences, kind)]
        out, _ = gated_delta_rule(*leaves, starts([30] * num_sequences))
        counts.append(operations_of(partial(torch.autograd.grad, out.sum(), leaves)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_chunks_are_not_as_large_as_all_chunks(kind: str) -> None:
    counts = []
    for num_rows in (130, 520):
        leaves = [t.requires_grad_() for t in operands(num_rows, kind)]
        out, _ = gated_delta_rule(*leaves, starts([num_rows]))
        counts.append(operations_of(partial(torch.autograd.grad, out.sum(), leaves))["aten::select_backward"])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gradients_are_as_near_to_the_exact_ones_as_transformers(kind: str) -> None:
    tensors, grad = operands(150, kind, torch.bfloat16), torch.randn(150, 4, 72).bfloat16()
    own = gradients(lambda *t: gated_delta_rule(*t, starts([150]))[0], tensors, grad)
    theirs = gradients(lambda *t: transformers_own(kind, *t), tensors, grad)
    exact = gradients(lambda *t: transformers_own(kind, *t), [t.float() for t in tensors], grad)
    for mine, other, true in zip(own, theirs, exact, strict=True):
        assert distance(mine, true) <= 1.001 * distance(other, true) + 1e-5


@pytest.mark.slow
def test_all_levels_with_fused_sums_have_the_same_bits() -> None:
    program = (
        "import torch; from lockstep.kernels.recurrent.delta_rule import gated_delta_rule as rule;"
        "from lockstep.kernels.recurrent.conv import causal_conv as conv;"
        "torch.manual_seed(0); n, r = torch.tensor([0, 50], dtype=torch.int32), torch.randn;"
        "o, s = rule(r(50, 2, 33), r(50, 2, 33), r(50, 4, 70), -r(50, 4).abs(), r(50, 4).sigmoid(), n);"
        "p, _ = conv(r(50, 70), r(70, 4), None, n, None, 'silu');"
        "from lockstep.kernels.recurrent.state_space import state_space;"
        "y, z = state_space(r(50, 4, 70), r(50, 4).abs(), -r(4).abs(), r(50, 2, 33), r(50, 2, 33), r(4), n);"
        "print([t.flatten().view(torch.int32).tolist() for t in (o, s, p, y, z)])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "LOCKSTEP_MAX_ISA": level},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for level in ("avx2", "avx512", "amx")
    }  # fmt: skip
    assert len(found) == 1


def test_operands_that_do_not_belong_together_are_refused() -> None:
    q, k, v, g, beta = operands(4, "by head")
    ends, initial = starts([4]), torch.randn(1, 4, 40, 72)
    wrong = {
        r"k \[4, 3, 40\]": (q, torch.randn(4, 3, 40), v, g, beta),
        r"k \[4, 0, 40\]": (q[:, :0], k[:, :0], v, g, beta),
        r"v \[3, 4, 72\]": (q, k, v[:3], g, beta),
        r"g \[2, 4\]": (q, k, v, g[:2], beta),
        r"beta \[4, 1\]": (q, k, v, g, beta[:, :1]),
        r"k \[4, 2, 40\] torch\.bfloat16": (q, k.bfloat16(), v, g, beta),
        r"states \[1, 4, 40, 71\]": (q, k, v, g, beta, initial[..., :71].contiguous()),
        r"states \[0, 4, 40, 72\]": (q, k, v, g, beta, initial[:0]),
    }
    for message, (*rows, states) in ((m, (*r, initial)[:6] if len(r) == 5 else r) for m, r in wrong.items()):
        with pytest.raises(ValueError, match=message):
            gated_delta_rule(*rows, ends, states)
        if len(states):
            slots = Slots(states, torch.tensor([0]), torch.tensor([0]))
            with pytest.raises(ValueError, match=message):
                gated_delta_rule_in_slots(*rows, ends, slots)
    slots = Slots(initial.bfloat16(), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"states \[1, 4, 40, 72\] torch\.bfloat16"):
        gated_delta_rule_in_slots(q, k, v, g, beta, ends, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slots_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in operands(9, "by head")]
    pool, reads, writes = torch.randn(5, 4, 40, 72, dtype=dtype), torch.tensor([0, 3]), torch.tensor([4, 1])
    before = pool.clone()
    out, final = gated_delta_rule(*tensors, starts([4, 5]), pool[reads])
    assert torch.equal(gated_delta_rule_in_slots(*tensors, starts([4, 5]), Slots(pool, reads, writes)), out)
    assert torch.equal(pool[writes], final)
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])
