"""Tests of the causal convolution: values and slopes are PyTorch's; a row's bits depend on its inputs alone."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.recurrent.conv import causal_conv, causal_conv_in_slots
from lockstep.kernels.recurrent.slots import Slots
from lockstep.tests.support.operations import operations_of

LENGTHS = [1, 30, 2, 67, 3]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def pytorchs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve one sequence as transformers does."""
    before = weight.shape[1] - 1
    out = F.conv1d(x.t()[None], weight[:, None], bias, padding=before, groups=len(weight))[0, :, : len(x)]
    return F.silu(out).t()


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_is_convolved_as_pytorch_does(width: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((sum(LENGTHS), 37), (37, width), (37,)))
    out, final = causal_conv(x, weight, bias, starts(LENGTHS), None, "silu")
    tolerance = {"atol": 3e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    for s, part in enumerate(x.split(LENGTHS)):
        torch.testing.assert_close(out.split(LENGTHS)[s], pytorchs(part, weight, bias), **tolerance)
        assert torch.equal(final[s], torch.cat([part.new_zeros(width - 1, 37), part])[len(part) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 13, 64])
def test_a_row_has_the_same_bits_for_any_cut_of_its_sequence(dtype: torch.dtype, size: int) -> None:
    fused = torch.randn(103, 700).to(dtype)
    x, weight = fused[:, 50:600], torch.randn(550, 4).to(dtype)  # rows that lie apart in memory
    whole, end = causal_conv(x, weight, None, starts([103]), None, "silu")
    parts, state = [], None
    for part in x.split(size):
        beside = torch.cat([torch.randn(5, 550).to(dtype), part])
        both = torch.randn(2, 3, 550).to(dtype)
        both[1] = 0 if state is None else state
        out, final = causal_conv(beside, weight, None, starts([5, len(part)]), both, "silu")
        parts.append(out[5:])
        state = final[1]
    assert torch.equal(torch.cat(parts), whole)
    assert state is not None and torch.equal(state, end[0])


def test_slopes_are_those_of_its_values() -> None:
    x, weight, bias, initial = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 3), (3, 4), (3,), (3, 3, 3))
    )
    ends = starts([2, 6, 1])
    assert torch.autograd.gradcheck(lambda *t: causal_conv(*t[:3], ends, t[3], "silu"), (x, weight, bias, initial))


def test_gradients_are_pytorchs() -> None:
    mine = [torch.randn(50, 19, requires_grad=True), torch.randn(19, 4, requires_grad=True)]
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    out, _ = causal_conv(*mine, None, starts([50]), None, "silu")
    grad = torch.randn(50, 19)
    out.backward(grad)
    pytorchs(*theirs, None).backward(grad)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_an_unknown_activation_and_mixed_dtypes_are_refused() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 2)
    with pytest.raises(ValueError, match="'gelu'"):
        causal_conv(x, weight, None, starts([3]), None, "gelu")
    with pytest.raises(ValueError, match=r"weight \[4, 2\] torch\.bfloat16"):
        causal_conv(x, weight.bfloat16(), None, starts([3]))


def test_operands_that_do_not_belong_together_are_refused() -> None:
    x, weight, bias, initial, ends = (
        torch.randn(3, 4),
        torch.randn(4, 2),
        torch.randn(4),
        torch.randn(1, 1, 4),
        starts([3]),
    )
    for message, operands in {
        r"weight \[3, 2\]": (weight[:3], bias, initial),
        r"bias \[3\]": (weight, bias[:3], initial),
        r"states \[1, 2, 4\]": (weight, bias, torch.randn(1, 2, 4)),
        r"weight \[4, 2\] torch\.bfloat16": (weight.bfloat16(), bias, initial),
        r"states \[1, 1, 4\] torch\.float64": (weight, bias, initial.double()),
    }.items():
        *of_layer, states = operands
        slots = Slots(states, torch.tensor([0]), torch.tensor([0]))
        with pytest.raises(ValueError, match=message):
            causal_conv(x, *of_layer, ends, states)
        with pytest.raises(ValueError, match=message):
            causal_conv_in_slots(x, *of_layer, ends, slots)
    with pytest.raises(ValueError, match=r"states \[2, 1, 4\]"):
        causal_conv(x, weight, bias, ends, torch.randn(2, 1, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slots_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    x, weight, pool = (torch.randn(shape, dtype=dtype) for shape in ((9, 6), (6, 4), (5, 3, 6)))
    reads, writes, ends = torch.tensor([0, 3]), torch.tensor([4, 1]), starts([2, 7])
    out, final = causal_conv(x, weight, None, ends, pool[reads], "silu")
    assert torch.equal(causal_conv_in_slots(x, weight, None, ends, Slots(pool, reads, writes), "silu"), out)
    assert torch.equal(pool[writes], final)


def test_a_backward_pass_runs_as_many_operations_for_many_sequences_as_for_few():
    """A slice for each sequence has a gradient as large as all rows: the cost grew with their product."""
    counts = []
    for num_sequences in (2, 50):
        x, weight = torch.randn(10 * num_sequences, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
        ends = torch.arange(0, len(x) + 1, 10, dtype=torch.int32)
        out, _ = causal_conv(x, weight, None, ends)
        counts.append(operations_of(partial(torch.autograd.grad, out.sum(), [x, weight])))
    assert counts[0] == counts[1]
