"""Tests of the last inputs of rows: those of each sequence alone, in any cut, from states in slots; gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lockstep.kernels.recurrent.slots import Slots
from lockstep.kernels.recurrent.windows import causal_windows

LENGTHS = [5, 1, 0, 3, 9, 1]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def by_hand(x: Tensor, width: int, initial: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the windows of one sequence and its final state: x [T, C], initial [w - 1, C]."""
    every = torch.cat([initial, x])
    taps = [every[width - 1 - lag : len(every) - lag] for lag in range(width)]
    return taps, every[len(every) - (width - 1) :]


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("has_states", [False, True])
def test_windows_of_packed_sequences_are_those_of_each_alone(width: int, has_states: bool) -> None:
    x, starts = torch.randn(sum(LENGTHS), 6), starts_of(LENGTHS)
    pool = torch.randn(20, width - 1, 6)
    reads, writes = torch.arange(len(LENGTHS)) + 3, torch.arange(len(LENGTHS)) + 10
    before = pool.clone()
    taps, final = causal_windows(x, starts, width, Slots(pool, reads, writes) if has_states else None)
    assert torch.equal(pool, before) and len(taps) == width
    for sequence, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
        initial = pool[reads[sequence]] if has_states else torch.zeros(width - 1, 6)
        own_taps, own_final = by_hand(x[first:end], width, initial)
        for tap, own in zip(taps, own_taps, strict=True):
            assert torch.equal(tap[first:end], own)
        assert torch.equal(final[sequence], own_final)


def test_some_lags_are_those_of_all() -> None:
    x, starts, pool = torch.randn(sum(LENGTHS), 6), starts_of(LENGTHS), torch.randn(20, 6, 6)
    slots = Slots(pool, torch.arange(6) + 3, torch.arange(6) + 10)
    taps, final = causal_windows(x, starts, 7, slots)
    some, same = causal_windows(x, starts, 7, slots, [0, 3, 6])
    assert all(torch.equal(tap, taps[lag]) for tap, lag in zip(some, (0, 3, 6), strict=True))
    assert torch.equal(final, same)


def test_a_sequence_that_continues_the_one_before_it_has_the_windows_of_both_as_one() -> None:
    x, pool = torch.randn(9, 4), torch.randn(8, 3, 4)
    whole = causal_windows(x[:7], starts_of([7]), 4, Slots(pool, torch.tensor([1]), torch.tensor([2])))
    reads, writes = torch.tensor([1, 3, 4, 0]), torch.tensor([3, 4, 2, 6])  # rows of a draft, and another sequence
    taps, final = causal_windows(x, starts_of([2, 1, 4, 2]), 4, Slots(pool, reads, writes))
    assert all(torch.equal(tap[:7], own) for tap, own in zip(taps, whole[0], strict=True))
    assert torch.equal(final[2], whole[1][0])
    alone = causal_windows(x[:2], starts_of([2]), 4, Slots(pool, torch.tensor([1]), torch.tensor([2])))
    assert torch.equal(final[0], alone[1][0])


def test_gradients_are_those_of_the_inputs_that_each_row_has() -> None:
    starts, weights = starts_of([4, 2]), torch.randn(3, 6, 5, dtype=torch.float64)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)

    def total(x: Tensor) -> Tensor:
        taps, _ = causal_windows(x, starts, 3)
        return sum((weight * tap for weight, tap in zip(weights, taps, strict=True)), torch.zeros_like(x))

    assert torch.autograd.gradcheck(total, [x])
