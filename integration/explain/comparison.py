"""Two recordings of one sequence compared: the first operation, row and element that differ, with their distance.

Every operation of a row follows from earlier operations of this row and of the rows before it, so the first operation
in the order of execution with a difference, whichever row has it, is one whose inputs were equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .recording import Operation, Recording, Rows, common

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
             torch.float64: torch.int64}  # fmt: skip
LOGPROB = Operation(None, "log-probability")
_NOT_A_NUMBER = 2**62  # distance from a NaN to a number


@dataclass(frozen=True)
class Element:
    """One element of an operation's result that differs."""

    operation: Operation
    position: int  # the row: of the token that was put in
    index: tuple[int, ...]  # in the row; (head, channel) around the attention
    first: float
    second: float
    ulps: int  # between them, in units of `dtype`


@dataclass(frozen=True)
class OperationGap:
    """The difference of one operation's results."""

    operation: Operation
    num_rows: int  # that both have
    num_rows_apart: int
    max_ulps: int
    max_difference: float
    first: Element | None  # of the first row that differs, the first element; None: nothing differs


@dataclass(frozen=True)
class Explanation:
    """The result of a comparison."""

    gaps: tuple[OperationGap, ...]  # of the operations that both have, in the order of execution
    only: tuple[tuple[Operation, ...], tuple[Operation, ...]]  # that only the one, or the other, has in this form
    dtype: str  # in whose units distances are: the coarser one of the two

    @property
    def first(self) -> Element | None:
        """Where the ways part. None: nowhere."""
        return next((gap.first for gap in self.gaps if gap.first is not None), None)


def compare(first: Recording, second: Recording, at_least: int = 1) -> Explanation:
    """Compare two recordings; raises ValueError if they share no operation.

    Numbers of two dtypes are both rounded to the coarser. at_least: ignore distances of fewer ulps.
    """
    shared = common(first.operations, second.operations)
    apart = [op for op in shared if not _alike(first.operations[op], second.operations[op])]
    shared = [op for op in shared if op not in set(apart)]
    if not shared:
        raise ValueError("the two ways share no operation, so they cannot be compared")
    gaps = [_gap(op, first.operations[op], second.operations[op], at_least) for op in shared]
    if (last := _logprob_gap(first, second, at_least)) is not None:
        gaps.append(last)
    only = [tuple(op for op in its.operations if op not in set(shared)) for its in (first, second)]
    dtypes = {_coarser(rows.values[0].dtype for rows in (first.operations[op], second.operations[op])) for op in shared}
    return Explanation(tuple(gaps), (only[0], only[1]), str(_coarser(dtypes)).removeprefix("torch."))


def ulps_between(first: Tensor, second: Tensor) -> Tensor:
    """Return the number of steps from one number to the other, int64, of two tensors of one dtype.

    Equal numbers, zeros of either sign and pairs of NaN are 0 apart; a NaN and a number, more than any two numbers.
    """
    steps = (_in_order(first) - _in_order(second)).abs()
    odd = first.isnan() != second.isnan()
    return steps.masked_fill(first.isnan() & second.isnan(), 0).masked_fill(odd, _NOT_A_NUMBER)


def _in_order(values: Tensor) -> Tensor:
    """Return the bits as integers in the order of the numbers: neighbours differ by 1, and both zeros are 0."""
    bits = values.contiguous().view(_INTEGERS[values.dtype])
    magnitude = (bits & torch.iinfo(bits.dtype).max).long()
    return torch.where(bits < 0, -magnitude, magnitude)


def _coarser(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _alike(first: Rows, second: Rows) -> bool:
    return first.values[0].shape[1:] == second.values[0].shape[1:]


def _gap(operation: Operation, first: Rows, second: Rows, at_least: int) -> OperationGap:
    positions, values = _shared_rows(first, second)
    dtype = _coarser(value.dtype for value in values)
    one, other = (value.to(dtype) for value in values)
    ulps = ulps_between(one, other).flatten(1)
    by_row = ulps.amax(1) if ulps.numel() else ulps.new_zeros(len(ulps))
    apart = (by_row >= at_least).nonzero().flatten().tolist()
    difference = (values[0].double() - values[1].double()).abs()
    element = None
    if apart:
        row = apart[0]
        flat = int((ulps[row] >= at_least).nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), one.shape[1:]))
        found, others = (float(value[row].flatten()[flat]) for value in values)
        element = Element(operation, positions[row], index, found, others, int(ulps[row, flat]))
    largest = float(difference.nan_to_num(nan=0.0, posinf=0.0).max()) if difference.numel() else 0.0
    return OperationGap(
        operation, len(positions), len(apart), int(by_row.max()) if len(by_row) else 0, largest, element
    )


def _shared_rows(first: Rows, second: Rows) -> tuple[list[int], list[Tensor]]:
    """Return the positions that both have, and their rows."""
    (one, its_values), (other, others_values) = first.by_position(), second.by_position()
    if one == other:
        return one, [its_values, others_values]
    both = sorted(set(one) & set(other))
    at = ({position: row for row, position in enumerate(positions)} for positions in (one, other))
    rows = [[places[position] for position in both] for places in at]
    return both, [values[index] for values, index in zip((its_values, others_values), rows, strict=True)]


def _logprob_gap(first: Recording, second: Recording, at_least: int) -> OperationGap | None:
    both = sorted(first.logprobs.keys() & second.logprobs.keys())
    if not both:
        return None
    rows = partial(_logprob_rows, both)
    return _gap(LOGPROB, rows(first), rows(second), at_least)


def _logprob_rows(positions: list[int], recording: Recording) -> Rows:
    values = torch.tensor([recording.logprobs[position] for position in positions], dtype=torch.float32)
    return Rows(positions, [values[:, None]])


def apart(explanation: Explanation) -> Iterator[OperationGap]:
    """Yield the operations that differ, in the order of execution."""
    return (gap for gap in explanation.gaps if gap.first is not None)
