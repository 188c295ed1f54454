"""Check that samples of a product of parameters hold what they promise, and leave no row out."""

from __future__ import annotations

import itertools

import pytest

from lockstep.tests.support.covering import covering, covering_rows


@pytest.mark.parametrize("sizes", [(2, 2), (12, 2), (2, 2, 2), (4, 2, 3, 2)])
@pytest.mark.parametrize("together", [1, 2])
def test_any_values_of_so_many_axes_meet(together, sizes):
    rows = covering_rows(together, sizes)
    for axes in itertools.combinations(range(len(sizes)), together):
        met = {tuple(row[axis] for axis in axes) for row in rows}
        assert met == set(itertools.product(*(range(sizes[axis]) for axis in axes)))
    assert len(rows) < len(list(itertools.product(*map(range, sizes)))) or together == len(sizes)


def test_the_rest_of_the_product_keeps_its_mark():
    mark = covering(1, rest="slow", letter=["a", "b"], number=[1, 2, 3]).mark
    names, params = mark.args
    assert names == ("letter", "number")
    assert [param.values for param in params] == list(itertools.product(["a", "b"], [1, 2, 3]))
    marked = {param.id: [m.name for m in param.marks] for param in params}
    assert sum(names == ["slow"] for names in marked.values()) == 3
    assert sum(names == [] for names in marked.values()) == 3


def test_the_slow_suite_has_more_rows_in_which_more_values_meet():
    sizes = (4, 2, 3)
    _, params = covering(1, in_slow=2, a=range(4), b=range(2), c=range(3)).mark.args
    rows: dict[str, set[tuple[int, ...]]] = {"": set(), "slow": set(), "exhaustive": set()}
    for param in params:
        rows["".join(mark.name for mark in param.marks)].add(param.values)
    assert rows[""] == covering_rows(1, sizes) and len(rows["exhaustive"]) >= 6
    for axes in itertools.combinations(range(3), 2):
        met = {tuple(row[axis] for axis in axes) for row in rows[""] | rows["slow"]}
        assert met == set(itertools.product(*(range(sizes[axis]) for axis in axes)))
