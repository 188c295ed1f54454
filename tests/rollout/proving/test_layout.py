"""The plan of a proof: which samples are proven together, and in how many blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.rollout.proving import layout
from lockstep.rollout.proving.claim import ClaimedSpan, KeptRows
from lockstep.rollout.proving.layout import Task, batches, num_blocks, plan

BLOCK = 4


def tasks_of(num_prompt: int, lengths: list[int], kept: tuple[KeptRows, ...] = ()) -> list[Task]:
    claim = SimpleNamespace(prompt_ids=tuple(range(num_prompt)), num_prompt_tokens=num_prompt)
    return [Task(number, claim, ClaimedSpan("1", "d", 0, end, kept)) for number, end in enumerate(lengths)]


@given(
    st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=12), st.booleans(), st.integers(1, 40),
)  # fmt: skip
def test_groups_are_divided_where_the_next_sample_does_not_fit(num_prompt, lengths, has_kept, most):
    tasks = tasks_of(num_prompt, lengths, (KeptRows("old", 1),) if has_kept else ())
    parts = [group for batch in batches(tasks, BLOCK, most) for group in batch.groups]
    assert [task for part in parts for task in part] == tasks
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert len(part) == 1 or num_blocks(part, BLOCK) <= most
        assert following is None or num_blocks([*part, following[0]], BLOCK) > most
    for batch in batches(tasks, BLOCK, most):
        assert batch.num_blocks == sum(num_blocks(group, BLOCK) for group in batch.groups)
        if not has_kept:
            tables = [rows.table for phase in plan(batch, BLOCK).phases for rows in phase.rows]
            assert max(int(table.max()) for table in tables if len(table)) == batch.num_blocks - 1


@pytest.mark.parametrize("num", [100, 200])
def test_the_blocks_of_each_sample_of_a_prompt_are_counted_a_few_times_however_many_there_are(num, monkeypatch):
    counted = []
    rows = layout.Task.num_rows.fget
    monkeypatch.setattr(layout.Task, "num_rows", property(lambda task: (counted.append(task), rows(task))[1]))
    batches(tasks_of(50, [100] * num), BLOCK, 10**9)
    assert len(counted) <= 4 * num
