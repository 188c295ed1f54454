"""Tests of the state space recurrence: values and gradients are transformers'; bits depend on the sequence alone."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

from lockstep.kernels.recurrent.delta_rule import DeltaRule, gated_delta_rule, reference_gated_delta_rule
from lockstep.kernels.recurrent.slots import Slots
from lockstep.kernels.recurrent.state_space import state_space, state_space_in_slots

LENGTHS = [1, 70, 5, 130]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def operands(rows: int, dtype: torch.dtype = torch.float32, head_dim: int = 72) -> list[Tensor]:
    """Return x, dt, a, b, c and d of 4 heads in 2 groups; some heads forget in one token, others in a hundred."""
    x, b, c = (torch.randn(shape).to(dtype) for shape in ((rows, 4, head_dim), (rows, 2, 40), (rows, 2, 40)))
    a = -torch.tensor([0.05, 1.0, 8.0, 60.0])
    return [x, torch.rand(rows, 4).to(dtype), a, b, c, torch.randn(4).to(dtype)]


def rows_of(tensors: list[Tensor], first: int, end: int) -> list[Tensor]:
    return [t if t.dim() == 1 else t[first:end] for t in tensors]


def transformers_own(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return mamba2_chunk_scan(x[None], dt[None], a, b[None], c[None], chunk_size=32, D=d)[0]


def test_values_are_those_of_transformers_and_of_the_reference() -> None:
    tensors = operands(sum(LENGTHS))
    out, final = state_space(*tensors, starts(LENGTHS))
    for first, end in itertools.pairwise(starts(LENGTHS).tolist()):
        assert distance(out[first:end], transformers_own(*rows_of(tensors, first, end))) < 1e-6
    x, dt, a, b, c, d = tensors
    rule = DeltaRule(1.0, None, corrects=False)
    expected, end_states = reference_gated_delta_rule(c, b, x, dt * a, dt, None, starts(LENGTHS), rule)
    assert distance(out, expected + d[:, None] * x) < 1e-6 and distance(final, end_states) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [6, 64, 72])
def test_a_row_has_the_same_bits_for_any_cut_of_its_sequence(dtype: torch.dtype, head_dim: int) -> None:
    tensors = operands(130, dtype, head_dim)
    whole, end = state_space(*tensors, starts([130]))
    assert whole.dtype == torch.float32 == end.dtype
    for size in (1, 13, 64, 100):
        parts, state = [], torch.zeros_like(end[0])
        for first in range(0, 130, size):
            part, other = rows_of(tensors, first, first + size), operands(7, dtype, head_dim)
            both = [p if p.dim() == 1 else torch.cat([o, p]) for o, p in zip(other, part, strict=True)]
            initial = torch.stack([torch.randn_like(state), state])
            out, final = state_space(*both, starts([7, len(part[0])]), initial)
            parts.append(out[7:])
            state = final[1]
        assert torch.equal(torch.cat(parts), whole), size
        assert torch.equal(state, end[0]), size


def test_slopes_are_those_of_its_values() -> None:
    ends = starts([5, 0, 14])
    shapes = ((19, 2, 4), (19, 2), (2,), (19, 1, 3), (19, 1, 3), (2,), (3, 2, 3, 4))
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    leaves[1], leaves[2] = leaves[1].abs(), -leaves[2].abs()
    leaves = [t.requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(lambda *t: state_space(*t[:6], ends, t[6]), leaves, fast_mode=True)


def gradients(function: object, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    assert callable(function)
    out = function(*leaves)
    return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_near_to_the_exact_ones_as_those_of_transformers_chunks(dtype: torch.dtype) -> None:
    tensors, grad = operands(150, dtype), torch.randn(150, 4, 72)
    own = gradients(lambda *t: state_space(*t, starts([150]))[0], tensors, grad)
    theirs = gradients(transformers_own, tensors, grad)
    exact = gradients(lambda *t: state_space(*t, starts([150]))[0], [t.double() for t in tensors], grad)
    for mine, other, true in zip(own, theirs, exact, strict=True):
        if dtype == torch.float32:
            assert distance(mine, other) < 1e-5
        else:
            assert distance(mine, true) <= 1.001 * distance(other, true) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slots_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in operands(9)]
    pool, reads, writes = torch.randn(5, 4, 40, 72, dtype=dtype), torch.tensor([0, 3]), torch.tensor([4, 1])
    before = pool.clone()
    out, final = state_space(*tensors, starts([4, 5]), pool[reads])
    assert torch.equal(state_space_in_slots(*tensors, starts([4, 5]), Slots(pool, reads, writes)), out)
    assert torch.equal(pool[writes], final)
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])


def test_a_rule_without_correction_takes_one_decay_a_head_and_no_bfloat16() -> None:
    x, dt, _, b, c, _ = operands(3)
    with pytest.raises(ValueError, match="a decay per head, and no bfloat16"):
        gated_delta_rule(c, b, x, -torch.rand(3, 4, 40), dt, starts([3]), corrects=False)
