"""Distances in units in the last place, and the place of the first difference."""

import math

import pytest
import torch

from lockstep.integration.explain.comparison import compare, ulps_between
from lockstep.integration.explain.recording import Operation, Recording, Rows

FIRST, SECOND = Operation(0, "a"), Operation(0, "b")


def recording(**rows: list[list[float]]) -> Recording:
    operations = {Operation(0, name): Rows(list(range(len(its))), [torch.tensor(its)]) for name, its in rows.items()}
    return Recording(operations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_neighbours_are_one_apart_across_powers_and_zero(dtype):
    numbers = torch.tensor([0.0, 1.0, 1.5, -1.0, 3e-5, 2.0], dtype=dtype)
    after = torch.nextafter(numbers, torch.full_like(numbers, math.inf))
    assert ulps_between(numbers, after).tolist() == [1] * 6
    smallest = torch.nextafter(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    assert ulps_between(-smallest, smallest).tolist() == [2]


def test_zeros_and_pairs_of_nan_are_equal_and_a_lone_nan_is_far():
    one, other = torch.tensor([0.0, math.nan, math.nan]), torch.tensor([-0.0, math.nan, 1.0])
    assert ulps_between(one, other).tolist()[:2] == [0, 0]
    assert ulps_between(one, other)[2] > 2**32


def test_the_first_operation_in_execution_order_is_named_whichever_row_has_it():
    one = recording(a=[[1.0, 1.0], [1.0, 1.0]], b=[[2.0], [2.0]])
    other = recording(a=[[1.0, 1.0], [1.0, 1.0000001]], b=[[2.5], [2.5]])
    explanation = compare(one, other)
    assert explanation.first is not None
    assert explanation.first.operation == FIRST
    assert (explanation.first.position, explanation.first.index, explanation.first.ulps) == (1, (1,), 1)
    assert [gap.num_rows_apart for gap in explanation.gaps] == [1, 2]
    assert explanation.gaps[1].max_difference == 0.5


def test_only_rows_that_both_have_are_compared():
    one, other = recording(a=[[1.0], [1.0], [1.0]]), recording(a=[[5.0], [1.0], [1.0]])
    one.operations[FIRST].positions = [1, 2, 3]
    other.operations[FIRST].positions = [0, 2, 3]
    explanation = compare(one, other)
    assert explanation.first is None
    assert explanation.gaps[0].num_rows == 2


def test_of_a_row_that_was_computed_twice_the_last_counts():
    one, other = recording(a=[[1.0]]), recording(a=[[9.0]])
    other.operations[FIRST].add([0], torch.tensor([[1.0]]))
    assert compare(one, other).first is None


def test_operations_of_other_shapes_or_of_one_way_only_are_listed():
    one, other = recording(a=[[1.0]], b=[[1.0]]), recording(a=[[1.0]], b=[[1.0, 2.0]], c=[[1.0]])
    explanation = compare(one, other)
    assert [gap.operation for gap in explanation.gaps] == [FIRST]
    assert explanation.only == ((SECOND,), (SECOND, Operation(0, "c")))
    with pytest.raises(ValueError, match="share no operation"):
        compare(one, recording(d=[[1.0]]))


def test_log_probabilities_come_last():
    one, other = recording(a=[[1.0]]), recording(a=[[1.0]])
    one.logprobs, other.logprobs = {3: -1.0, 4: -2.0}, {3: -1.0, 4: -2.5, 5: -1.0}
    explanation = compare(one, other)
    assert explanation.first is not None
    assert explanation.first.operation.name == "log-probability"
    assert explanation.first.position == 4
