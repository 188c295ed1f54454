"""Tests of the selective scan: values and gradients are transformers'; bits depend on the sequence alone."""

import itertools

import pytest
import torch
from torch import Tensor

from lockstep.kernels.recurrent import scan_gradient
from lockstep.kernels.recurrent.delta_rule import DeltaRule, gated_delta_rule, reference_gated_delta_rule
from lockstep.kernels.recurrent.selective_scan import selective_scan, selective_scan_in_slots
from lockstep.kernels.recurrent.slots import Slots
from lockstep.tests.optional_packages import needs_transformers

LENGTHS = [1, 70, 5, 130]
HEADS, STATE = 2, 16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def operands(rows: int, dtype: torch.dtype = torch.float32, width: int = 72, heads: int = HEADS) -> list[Tensor]:
    """Return x, dt, a, b, c and d; some elements forget in one token, others in a thousand."""
    x, dt, b, c = (torch.randn(rows, heads, size).to(dtype) for size in (width, width, STATE, STATE))
    a = -torch.exp(torch.empty(heads, width, STATE).uniform_(-6, 4))
    return [x, dt.sigmoid(), a, b, c, torch.randn(heads, width).to(dtype)]


def rows_of(tensors: list[Tensor], first: int, end: int) -> list[Tensor]:
    x, dt, a, b, c, d = tensors
    return [x[first:end], dt[first:end], a, b[first:end], c[first:end], d]


def transformers_own(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Compute each head with transformers' function, which takes tokens last."""
    needs_transformers(5, 23)
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    x, dt, b, c = (t.permute(1, 2, 0)[:, None] for t in (x, dt, b, c))
    heads = [mamba_selective_scan(x[h], dt[h], a[h], b[h], c[h], D=d[h]) for h in range(len(a))]
    return torch.cat(heads).permute(2, 0, 1)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_values_are_those_of_transformers_and_of_the_reference() -> None:
    tensors = operands(sum(LENGTHS))
    out, final = selective_scan(*tensors, starts(LENGTHS))
    for first, end in itertools.pairwise(starts(LENGTHS).tolist()):
        assert distance(out[first:end], transformers_own(*rows_of(tensors, first, end))) < 1e-6
    x, dt, a, b, c, d = tensors
    rule = DeltaRule(1.0, None, corrects=False)
    expected, end_states = reference_gated_delta_rule(c, b, x, a.mT, dt, None, starts(LENGTHS), rule)
    assert distance(out, expected + d * x) < 1e-6 and distance(final, end_states) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [6, 64, 72])
def test_a_row_has_the_same_bits_for_any_cut_of_its_sequence(dtype: torch.dtype, width: int) -> None:
    tensors = operands(130, dtype, width)
    whole, end = selective_scan(*tensors, starts([130]))
    assert whole.dtype == torch.float32 == end.dtype
    for size in (1, 13, 64, 100):
        parts, state = [], torch.zeros_like(end[0])
        for first in range(0, 130, size):
            part, other = rows_of(tensors, first, first + size), operands(7, dtype, width)
            both = [p if i in (2, 5) else torch.cat([o, p]) for i, (o, p) in enumerate(zip(other, part, strict=True))]
            initial = torch.stack([torch.randn_like(state), state])
            out, final = selective_scan(*both, starts([7, len(part[0])]), initial)
            parts.append(out[7:])
            state = final[1]
        assert torch.equal(torch.cat(parts), whole), size
        assert torch.equal(state, end[0]), size


@pytest.mark.parametrize("tokens_a_part", [1, 3, 64])
def test_slopes_are_those_of_its_values(monkeypatch: pytest.MonkeyPatch, tokens_a_part: int) -> None:
    monkeypatch.setattr(scan_gradient, "PART_ELEMENTS", tokens_a_part * 2 * 3 * 4)  # of one sequence
    ends = starts([5, 0, 14, 5])
    shapes = ((24, 2, 4), (24, 2, 4), (2, 4, 3), (24, 2, 3), (24, 2, 3), (2, 4), (4, 2, 3, 4))
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    leaves[1], leaves[2] = leaves[1].abs(), -leaves[2].abs()
    leaves = [t.requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(lambda *t: selective_scan(*t[:6], ends, t[6]), leaves, fast_mode=True)
    # Of the results or of the states alone, and from states of zeros.
    assert torch.autograd.gradcheck(lambda *t: selective_scan(*t, ends)[0], leaves[:6], fast_mode=True)
    assert torch.autograd.gradcheck(lambda *t: selective_scan(*t, ends)[1], [*leaves[:5], None], fast_mode=True)


def gradients(function: object, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    assert callable(function)
    out = function(*leaves)
    return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_near_to_the_exact_ones_as_those_of_transformers_steps(dtype: torch.dtype) -> None:
    tensors, grad = operands(150, dtype), torch.randn(150, HEADS, 72)
    own = gradients(lambda *t: selective_scan(*t, starts([150]))[0], tensors, grad)
    theirs = gradients(transformers_own, tensors, grad)
    exact = gradients(lambda *t: selective_scan(*t, starts([150]))[0], [t.double() for t in tensors], grad)
    for mine, other, true in zip(own, theirs, exact, strict=True):
        if dtype == torch.float32:
            assert distance(mine, other) < 1e-5
        else:
            assert distance(mine, true) <= 1.001 * distance(other, true) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slots_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in operands(9)]
    pool, reads = torch.randn(5, HEADS, STATE, 72, dtype=dtype), torch.tensor([0, 3])
    before, writes = pool.clone(), torch.tensor([4, 1])
    out, final = selective_scan(*tensors, starts([4, 5]), pool[reads])
    assert torch.equal(selective_scan_in_slots(*tensors, starts([4, 5]), Slots(pool, reads, writes)), out)
    assert torch.equal(pool[writes], final)
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])


def test_operands_of_other_shapes_and_options_are_refused_by_name() -> None:
    x, dt, a, b, c, d = operands(3)
    with pytest.raises(ValueError, match=r"beta \[3, 2, 71\] torch.float32 do not belong together"):
        selective_scan(x, dt[..., 1:], a, b, c, d, starts([3]))
    with pytest.raises(
        ValueError, match=r"g \[2, 15, 72\] torch.float32, beta \[3, 2, 72\] torch.float32 do not belong"
    ):
        selective_scan(x, dt, a[..., 1:], b, c, d, starts([3]))
    with pytest.raises(ValueError, match="with the correction it takes a decay per head or per channel"):
        gated_delta_rule(c, b, x, a.mT, dt, starts([3]))
    with pytest.raises(ValueError, match="are those of selective_scan"):
        gated_delta_rule(c, b, x.requires_grad_(), a.mT, dt, starts([3]), corrects=False)
