"""The problems of a job that fit into the model's context, and those that do not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.planning.description import describe_plan
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sampling import RolloutSettings
from lockstep.integration.grpo.settings.sections import DataSettings, RunSettings
from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.grpo.tasks.task import build_task, check_lengths

TOKENIZER = build_tokenizer()
CONTEXT = 16
NUM_SPECIAL = len(TOKENIZER("1")["input_ids"]) - 1
ROOM = CONTEXT - 4 - NUM_SPECIAL  # characters of a prompt


def config(tmp_path, lengths, **data):
    """Return a job whose rows have prompts of so many characters."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1" * length, "answer": "1"}) + "\n" for length in lengths))
    rollout = RolloutSettings(prompts_per_step=2, max_new_tokens=4)
    return JobConfig(RunSettings("x", str(tmp_path)), data=DataSettings(path=str(path), **data), rollout=rollout)


def test_rows_with_prompts_that_are_too_long_are_refused_by_name(tmp_path):
    job = config(tmp_path, [1, ROOM, ROOM + 1, *[1] * 7])
    task = build_task(job, TOKENIZER, CONTEXT)
    assert len(task.all_known) == 10 and task.num_dropped == 0
    wanted = rf"rows.jsonl:3: the prompt has {ROOM + 1 + NUM_SPECIAL} tokens; .* takes prompts of {CONTEXT - 4}"
    with pytest.raises(ValueError, match=f'{wanted}; data.too_long="drop" leaves such rows out$'):
        check_lengths(task.all_known, TOKENIZER, 4, CONTEXT)


def test_rows_with_prompts_that_are_too_long_are_left_out_where_the_job_says_so(tmp_path):
    lengths = [ROOM + 1, *range(1, ROOM), ROOM, ROOM + 1, 100]  # the tenth row is held out, whatever is left out
    assert len(lengths) > 12
    whole = build_task(config(tmp_path, lengths), TOKENIZER, CONTEXT)
    task = build_task(config(tmp_path, lengths, too_long="drop"), TOKENIZER, CONTEXT)
    assert task.num_dropped == 3 and [len(one.prompt) for one in task.heldout] == [lengths[9]]
    assert task.heldout == whole.heldout
    assert [len(one.prompt) for one in task.all_known] == [*range(1, 9), *range(10, ROOM + 1), 9]
    *train, _ = task.all_known
    assert {one.prompt for one in task.train_problems(0, len(train))} == {one.prompt for one in train}
    check_lengths(task.all_known, TOKENIZER, 4, CONTEXT)


@pytest.mark.parametrize(
    ("lengths", "which"), [([100] * 9 + [1], "training"), ([1] * 9 + [100], "held-out"), ([100] * 10, "training")]
)
def test_a_job_that_has_no_rows_left_is_refused(tmp_path, lengths, which):
    with pytest.raises(ValueError, match=f"rows.jsonl: all {which} prompts are too long for a context of 16 tokens"):
        build_task(config(tmp_path, lengths, too_long="drop"), TOKENIZER, CONTEXT)


async def plays(row, session):
    """Ask in its own words."""


def test_a_plan_says_how_many_rows_are_left_out_and_an_environment_has_prompts_of_its_own(tmp_path):
    for package in ("matplotlib", "tensorboard", "zstandard"):
        pytest.importorskip(package)
    lengths = [100, *[1] * 10]  # the built model has a context of 64
    job = config(tmp_path, lengths)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the prompt has 10\d tokens"):
        check_job(job, 1)
    dropping = config(tmp_path, lengths, too_long="drop")
    check_job(dropping, 1)
    told = (
        "data       1 of 11 rows are left out: their prompts leave no room for rollout.max_new_tokens=4 in the model's"
    )
    assert told in describe_plan(dropping, 1) and "left out" not in describe_plan(job, 1)
    check_job(replace(job, environment=f"{__name__}:plays"), 1)
    with pytest.raises(ValueError, match=r'data.too_long must not be "drop" with environment'):
        replace(dropping, environment=f"{__name__}:plays")
    assert DataSettings(too_long="cut").faults()[0][0] == "too_long"
