"""Tests of several sources of problems: their shares, the draws of each, and what a run says of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from lockstep.integration.grpo.planning.description import describe_plan
from lockstep.integration.grpo.results.samples import read_samples
from lockstep.integration.grpo.settings.config import JobConfig, load_config
from lockstep.integration.grpo.settings.unread import unread_settings
from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.grpo.tasks.sources import Mixture, Source, SourceOrder, divided_by_weight
from lockstep.integration.grpo.tasks.task import build_task
from lockstep.tests.support.job_launcher import log_of, run_jobs

GENERATOR = random.Random(0)
WEIGHTS = [
    (1.0,), (1.0, 1.0), (0.7, 0.3), (5.0, 1.0, 1.0, 1.0), (1 / 3, 0.1, 1e-3), (0.5, 0.3, 0.2),
    *(tuple(GENERATOR.random() for _ in range(num)) for num in (2, 3, 7, 16)),
]  # fmt: skip
COIN = """
def coin(prompt, completion, answer):
    return float(sum(map(ord, completion)) % 2)
coin.success_at = 1.0
"""


def mixture(seed=3, **weights):
    return Mixture(
        {
            name: Source(weight, [Problem(f"{name}{number}", "") for number in range(11)])
            for name, weight in weights.items()
        },
        seed,
    )


@pytest.mark.parametrize("weights", WEIGHTS)
def test_counts_so_far_differ_from_the_shares_by_less_than_one_at_every_prompt(weights):
    order = SourceOrder(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    counts = [0] * len(weights)
    for place, chosen in enumerate(order.between(0, 500)):
        assert order.counts_before(place) == counts
        counts[chosen] += 1
        for weight, count in zip(exact, counts, strict=True):
            assert abs(count - (place + 1) * weight / sum(exact)) < 1


def test_places_are_the_same_whatever_was_asked_before():
    whole = SourceOrder((0.7, 0.3, 0.25)).between(0, 300)
    late = SourceOrder((0.7, 0.3, 0.25))
    assert late.between(200, 300) == whole[200:] and late.between(0, 5) == whole[:5]
    assert late.counts_before(250) == [whole[:250].count(source) for source in range(3)]


def test_counts_late_in_a_run_are_kept_and_not_counted_anew():
    weights = (0.70001, 0.2, 0.09999)
    chosen, order = SourceOrder(weights).between(0, 5000), SourceOrder(weights)
    for place in (4999, 0, 1023, 1024, 1025, 2048, 4096, 3000):
        assert order.counts_before(place) == [chosen[:place].count(source) for source in range(3)]
    assert order.counts_before(100_000 + 2000) == [70001 + 1400, 20000 + 400, 9999 + 200]  # a period, and more


def test_a_step_is_a_function_of_seed_and_step_and_each_source_is_gone_through():
    one = mixture(math=2.0, code=1.0)
    steps = [one(step, 6) for step in range(11)]
    assert mixture(math=2.0, code=1.0)(7, 6) == steps[7] != mixture(4, math=2.0, code=1.0)(7, 6)
    assert all(Counter(problem.prompt[:4] for problem in its) == {"math": 4, "code": 2} for its in steps)
    codes = [problem.prompt for its in steps for problem in its if problem.prompt.startswith("code")]
    assert len(set(codes[:11])) == 11 and sorted(codes[:11]) == sorted(codes[11:]) and codes[:11] != codes[11:]


def test_each_of_several_ranks_gets_problems_of_all_sources():
    one = mixture(math=1.0, code=1.0)
    first_ranks = Counter(problem.prompt[:4] for step in range(20) for problem in one(step, 8)[::2])
    assert min(first_ranks.values()) > 20


def test_replacements_come_from_the_same_source_and_are_none_of_the_steps_own():
    one = mixture(math=2.0, code=1.0)
    for step in range(5):
        attempts = [[problem.prompt for problem in one(step, 6, attempt)] for attempt in range(3)]
        assert len({tuple(prompt[:4] for prompt in its) for its in attempts}) == 1
        maths = [prompt for its in attempts[:2] for prompt in its if prompt.startswith("math")]
        codes = [prompt for its in attempts for prompt in its if prompt.startswith("code")]
        assert len(set(maths)) == 8 and len(set(codes)) == 6


@pytest.mark.parametrize(
    ("num", "weights", "limits", "given"),
    [
        (10, (1.0, 1.0), (20, 20), [5, 5]), (10, (0.7, 0.3), (20, 20), [7, 3]), (10, (1.0, 1.0), (2, 20), [2, 8]),
        (10, (1.0, 1.0), (2, 3), [2, 3]), (1, (1.0, 3.0), (5, 5), [0, 1]), (3, (1.0, 1.0), (0, 9), [0, 3]),
    ],
)  # fmt: skip
def test_a_number_is_divided_by_weight_within_limits(num, weights, limits, given):
    assert divided_by_weight(num, weights, limits) == given


def config(tmp_path: Path, *overrides: str, **sizes: int) -> JobConfig:
    tables = ""
    for name, num in (sizes or {"math": 60, "code": 40}).items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{name} {at}", "answer": "1"}) + "\n" for at in range(num)))
        tables += f'[data.sources.{name}]\npath = "{path}"\n'
    (tmp_path / "job.toml").write_text(f'[run]\nname = "x"\ndir = "{tmp_path}"\n{tables}')
    return load_config(tmp_path / "job.toml", overrides)


def task_of(*args, **sizes):
    return build_task(config(*args, **sizes), build_tokenizer(), 64)


def test_every_tenth_problem_of_each_source_is_held_out_in_proportion_to_the_weights(tmp_path):
    task = task_of(tmp_path)
    assert [one.prompt for one in task.heldout] == [
        *(f"math {at}" for at in range(9, 60, 10)), *(f"code {at}" for at in range(9, 40, 10)),
    ]  # fmt: skip
    held_out = {one.prompt for one in task.heldout}
    drawn = {problem.prompt: problem for step in range(20) for problem in task.train_problems(step, 8)}
    assert not held_out & drawn.keys() and len(drawn) == 90 and len(task.all_known) == 100
    assert all(problem.source_name == prompt[:4] for prompt, problem in drawn.items())
    few = task_of(tmp_path, "data.num_heldout=4", "data.sources.math.weight=3")
    assert Counter(one.source_name for one in few.heldout) == {"math": 3, "code": 1}
    assert len(task_of(tmp_path, math=60, code=5).heldout) == 6
    with pytest.raises(ValueError, match=r"data.sources: 18 problems are too few to hold one in 10 out"):
        task_of(tmp_path, math=9, code=9)


def test_a_file_of_held_out_problems_leaves_the_sources_whole(tmp_path):
    (tmp_path / "out.jsonl").write_text('{"prompt": "out", "answer": "1"}\n')
    task = task_of(tmp_path, f"data.heldout_path={tmp_path / 'out.jsonl'}", math=3, code=4)
    assert [one.prompt for one in task.heldout] == ["out"] and len(task.all_known) == 8


def test_a_source_may_name_fields_of_its_own(tmp_path):
    job = config(tmp_path, "data.sources.other.prompt_field=in.q", "data.sources.other.answer_field=a", math=9, other=1)
    (tmp_path / "other.jsonl").write_text('{"in": {"q": "one?"}, "a": 1}\n' * 10)
    task = build_task(job, build_tokenizer(), 64)
    assert [(one.prompt, one.answer) for one in task.heldout] == [("one?", "1")]


def test_the_plan_and_the_settings_that_are_read_know_of_sources(tmp_path):
    job = config(tmp_path, "data.sources.math.weight=3", "data.min_digits=2")
    assert "sources    of the prompts 75.0% math, 25.0% code" in describe_plan(job, 1).splitlines()
    assert unread_settings(job) == ["data.min_digits=2 (problems are not generated sums)"]
    assert set(job.data_files) == {"data.sources.math.path", "data.sources.code.path"}


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["data.sources.math.weight=0"], "data.sources.math.weight must be positive, not 0.0"),
        (["data.sources.math.weight=inf"], "data.sources.math.weight must be a finite number, not inf"),
        (["data.sources.other.weight=1"], "missing key data.sources.other.path"),
        (["data.sources.math.wieght=1"], "unknown key data.sources.math.wieght (is it data.sources.math.weight?)"),
        (["data.sources.a b.path=x"], "data.sources needs names of letters, digits and _ . -, not 'a b'"),
        (["data.path=x"], "data.sources must not be set with data.path"),
    ],
)
def test_faults_are_named_by_their_keys(tmp_path, overrides, why):
    with pytest.raises(ValueError) as error:
        config(tmp_path, *overrides)
    assert why in str(error.value)


@pytest.mark.slow
def test_ranks_and_runs_ahead_draw_the_same_with_replacements_of_the_same_source(tmp_path):
    found = {}
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        (folder / "coin.py").write_text(COIN)
        config(folder, math=30, code=30)
        common = (
            f"reward=coin:coin rollout.group_size=2 rollout.redraw=2 train.learning_rate=1e-30 "
            f"data.sources.math.path={folder}/math.jsonl data.sources.math.weight=3 "
            f"data.sources.code.path={folder}/code.jsonl"
        )
        run_jobs(folder, num_ranks, {"plain": common, "ahead": f"{common} rollout.ahead=1"})
        for name in ("plain", "ahead"):
            rows = [row for step in (1, 2, 3) for row in read_samples(folder / "runs" / name, step)]
            found[num_ranks, name] = [(row["source_name"], row["prompt"], row["token_ids"]) for row in rows]
            lines = log_of(folder, name)
            assert sum(line["redrawn_groups"] for line in lines) > 2
            assert all({"source/math/success", "source/code/reward_mean"} <= line.keys() for line in lines)
    assert len({str(rows) for rows in found.values()}) == 1
    assert Counter(name for name, *_ in found[1, "plain"]) == {"math": 18, "code": 6}
