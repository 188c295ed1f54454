"""Tests of block tables: the array and each sequence's own list say the same, and a change shows in the version."""

from __future__ import annotations

import random

from lockstep.rollout.sequences.block_tables import BlockTables


def test_a_sequences_list_and_the_array_agree_after_any_changes():
    dice, tables = random.Random(0), BlockTables()
    expected: dict[str, list[int]] = {}
    for step in range(600):
        id = f"s{dice.randrange(40)}"
        if id not in expected:
            tables.add(id)
            expected[id] = []
        elif dice.random() < 0.1:
            tables.drop(id)
            del expected[id]
            continue
        own = tables.own(id)
        before = own.version
        if dice.random() < 0.2:
            num = dice.randrange(len(expected[id]) + 2)
            tables.cut(id, num)
            del expected[id][num:]
        else:
            new = [dice.randrange(1000) for _ in range(dice.randrange(1, 5))]
            tables.append(id, new)
            expected[id] += new
        assert own.version > before and own.blocks == tables.blocks(id) == expected[id], step
        ids = list(expected)
        gathered = tables.gather(ids)
        assert [row[: len(expected[i])] for row, i in zip(gathered.tolist(), ids, strict=True)] == list(
            expected.values()
        )
    assert len(expected) > 20 and id in tables


def test_two_sequences_never_have_one_version():
    tables = BlockTables()
    seen = set()
    for index in range(20):
        tables.add(f"s{index}")
        tables.append(f"s{index}", [index])
        seen.add(tables.own(f"s{index}").version)
        if index % 2:
            tables.drop(f"s{index}")
    assert len(seen) == 20 and 0 not in seen
