"""The division of a recurrence's heads among the ranks of a stage."""

from __future__ import annotations

import pytest

from lockstep.rollout.model.recurrent.heads import WHOLE, HeadDivision
from lockstep.rollout.sharding.collectives import StageRanks


@pytest.mark.parametrize(("num_heads", "num_groups", "tp"), [(8, 4, 2), (8, 8, 4), (8, 2, 4), (6, 1, 3), (4, 4, 4)])
def test_each_rank_has_a_part_of_the_heads_and_the_groups_that_serve_them(num_heads, num_groups, tp):
    heads, groups = list(range(num_heads)), list(range(num_groups))
    found = []
    for rank in range(tp):
        share = HeadDivision(StageRanks(tp), rank).share(num_heads, num_groups)
        mine, keys = heads[share.heads], groups[share.key_heads]
        each = len(mine) // len(keys)
        assert [keys[i // each] for i in range(len(mine))] == [head * num_groups // num_heads for head in mine]
        found += mine
    assert found == heads


@pytest.mark.parametrize(("num_heads", "num_groups", "tp"), [(8, 4, 1), (6, 2, 4), (12, 3, 2)])
def test_heads_that_do_not_divide_are_whole_on_every_rank(num_heads, num_groups, tp):
    assert HeadDivision(StageRanks(tp), 0).share(num_heads, num_groups) is WHOLE
