"""Samples of a product of parameters: few rows in which every value, or any two values of two parameters, meet.

Combinatorial testing after Kuhn, Wallace and Gallo, "Software fault interactions and implications for software
testing" (2004): most faults show where one value or two meet. The other rows of the product stay, in a suite that runs
less often.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

import pytest


def covering(
    together: int, rest: str = "exhaustive", *, in_slow: int = 0, **axes: Collection[object]
) -> pytest.MarkDecorator:
    """Parametrize a test with the product of the axes, in which all rows but a covering sample have the mark `rest`.

    together: how many values of different axes meet in every combination in the sample: 1, each value at least once;
        2, each pair.
    in_slow: as many meet in every combination in the sample and in more rows, which are slow; 0, there are none.
    """
    rows = list(itertools.product(*axes.values()))
    sizes = [len(values) for values in axes.values()]
    sample = covering_rows(together, sizes)
    slow = covering_rows(in_slow, sizes, sample) if in_slow else set()
    params = []
    for row, place in zip(rows, itertools.product(*map(range, sizes)), strict=True):
        marks = [] if place in sample else [getattr(pytest.mark, "slow" if place in slow else rest)]
        params.append(pytest.param(*row, id="-".join(map(_name, row)), marks=marks))
    return pytest.mark.parametrize(tuple(axes), params)


def covering_rows(together: int, sizes: Sequence[int], given: Collection[tuple[int, ...]] = ()) -> set[tuple[int, ...]]:
    """Choose rows of the product of ranges in which, with the given ones, any values of any `together` of them meet,
    the greedy way."""
    return min((_greedy(together, sizes, given, is_even) for is_even in (True, False)), key=len)


def _greedy(
    together: int, sizes: Sequence[int], given: Collection[tuple[int, ...]], is_even: bool
) -> set[tuple[int, ...]]:
    """Take the row with the most new meetings again and again; of several, if is_even, the one of rarer values."""
    groups = list(itertools.combinations(range(len(sizes)), together))
    todo = {(group, values) for group in groups for values in itertools.product(*(range(sizes[i]) for i in group))}
    rows = list(itertools.product(*map(range, sizes)))
    meetings = {row: {(group, tuple(row[i] for i in group)) for group in groups} for row in rows}
    used: Counter[tuple[int, int]] = Counter()
    for row in given:
        used.update(enumerate(row))
        todo -= meetings[row]
    chosen = set()
    while todo:
        best = max(rows, key=lambda row: (len(meetings[row] & todo), -is_even * sum(used[at] for at in enumerate(row))))
        chosen.add(best)
        used.update(enumerate(best))
        todo -= meetings[best]
    return chosen


def _name(value: object) -> str:
    return getattr(value, "__name__", None) or str(value).removeprefix("torch.").replace(" ", "_")
