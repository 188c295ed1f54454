"""Tests of the evaluations of a run: their rows, seeds and turns, their metrics, and the best model by one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lockstep.integration.grpo.engines.answers import Answer
from lockstep.integration.grpo.evaluation import Evaluations
from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.planning.description import describe_plan
from lockstep.integration.grpo.results.best_model import BestModel
from lockstep.integration.grpo.results.settings_kept import settings_of
from lockstep.integration.grpo.rewards.score import Score
from lockstep.integration.grpo.settings.config import JobConfig, load_config
from lockstep.integration.grpo.settings.unread import unread_settings
from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.grpo.tasks.task import Task, build_task
from lockstep.integration.ranks import Ranks
from lockstep.rollout.completion import Completion, FinishReason
from lockstep.tests.support.job_launcher import log_of, run_jobs

CPU = torch.device("cpu")
RANKS = Ranks(0, 1, CPU)
ROWS = [Problem(f"p{number}", "") for number in range(5)]
TABLES = """
[evaluations.aime]
path = "aime.jsonl"
n = 4
temperature = 0.5
every = 4

[evaluations.math-500]
path = "math.jsonl"
num = 3
"""


def config(tmp_path: Path, *overrides: str, tables: str = TABLES) -> JobConfig:
    path = tmp_path / "job.toml"
    path.write_text(f'[run]\nname = "x"\ndir = "{tmp_path}"\nnum_steps = 7\neval_every = 3\n{tables}')
    return load_config(path, overrides)


def write(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return path


class Answers:
    """Gives the samples of each problem the rewards 0, 1, 0, ..., and keeps the prompts and seeds of each call."""

    def __init__(self):
        self.asked: list[dict[str, int | None]] = []

    def __call__(self, problems, params):
        self.asked.append({one.prompt: its.sampling_seed for one, its in zip(problems, params, strict=True)})
        return [
            Answer(Completion("id", at, (5,), (7,), "", (-0.5,), FinishReason("stop"), 0, 0, "0", None, ()),
                   Score(at % 2, {}, at % 2 == 1))
            for its in params for at in range(its.n)
        ]  # fmt: skip


class OneOfThree(Ranks):
    """A rank that sends its numbers to the first one, which is not there."""

    def in_turn(self, own):
        return []


def evaluations(tmp_path, answers, ranks=RANKS, *overrides):
    job = config(tmp_path, *overrides)
    task = Task(lambda step, num: [], ROWS, (), evaluations=dict.fromkeys(job.evaluations, ROWS))
    return Evaluations(job, ranks, task, answers)


def test_each_evaluation_has_its_turn_and_all_have_the_first_and_the_last_step(tmp_path):
    found = evaluations(tmp_path, Answers())
    assert [found.due(step) for step in range(8)] == [
        ["", "aime", "math-500"], [], [], ["", "math-500"], ["aime"], [], ["", "math-500"], ["", "aime", "math-500"],
    ]  # fmt: skip


def test_metrics_end_with_the_names_of_their_evaluations(tmp_path):
    found = evaluations(tmp_path, Answers())
    assert found.run(found.due(0)) == {
        "eval_reward_mean": 0.0, "eval_success": 0.0,
        "eval_reward_mean/aime": 0.5, "eval_success/aime": 0.5,
        "eval_pass@2/aime": pytest.approx(5 / 6), "eval_pass@4/aime": 1.0,
        "eval_reward_mean/math-500": 0.0, "eval_success/math-500": 0.0,
    }  # fmt: skip
    assert len(found.examples) == 2
    assert set(found.run(["aime"])) == {f"eval_{one}/aime" for one in ("reward_mean", "success", "pass@2", "pass@4")}
    assert found.examples == []


def test_seeds_are_the_same_each_time_and_others_in_each_evaluation(tmp_path):
    answers = Answers()
    found = evaluations(tmp_path, answers)
    found.run(found.due(0))
    found.run(found.due(0))
    first, second = answers.asked[:3], answers.asked[3:]
    assert first == second and len({seed for its in first for seed in its.values()}) == 15
    alone = Answers()
    evaluations(tmp_path, alone, RANKS, "evaluations.other.path=o.jsonl").run(["aime"])
    assert alone.asked == [first[1]], "an evaluation more changes no seed of others"


def test_ranks_share_the_rows_with_the_seeds_of_one_rank(tmp_path):
    whole, shared = Answers(), Answers()
    evaluations(tmp_path, whole).run(["aime"])
    for ranks in (OneOfThree(1, 3, CPU), OneOfThree(2, 3, CPU)):
        assert evaluations(tmp_path, shared, ranks).run(["aime"]) == {}
    assert [list(its) for its in shared.asked] == [["p1", "p4"], ["p2"]]
    assert {**shared.asked[0], **shared.asked[1]}.items() < whole.asked[0].items()


def test_rows_come_from_the_files_and_are_checked_before_the_start(tmp_path):
    for package in ("matplotlib", "zstandard"):
        pytest.importorskip(package)
    paths = [f"evaluations.{name}.path={write(tmp_path / f'{name}.jsonl', *'abcde')}" for name in ("aime", "math-500")]
    job = config(tmp_path, *paths)
    task = build_task(job, build_tokenizer(), 64)
    assert {name: [one.prompt for one in its] for name, its in task.evaluations.items()} == {
        "aime": ["a", "b", "c", "d", "e"], "math-500": ["a", "b", "c"],
    }  # fmt: skip
    (tmp_path / "q.jsonl").write_text('{"q": "one?", "answer": {"last": 2}}\n')
    own = (f"evaluations.aime.path={tmp_path / 'q.jsonl'}", "evaluations.aime.prompt_field=q")
    named = build_task(
        config(tmp_path, *paths, *own, "evaluations.aime.answer_field=answer.last"), build_tokenizer(), 64
    )
    assert named.evaluations["aime"] == [Problem("one?", "2")]
    check_job(job, 1)
    assert "evaluation aime: up to 512 rows of" in describe_plan(job, 1)
    write(tmp_path / "aime.jsonl", "a", "b" * 70)
    with pytest.raises(ValueError, match=r"aime.jsonl:2: the prompt has 71 tokens"):
        check_job(job, 1)
    dropped = build_task(config(tmp_path, *paths, "data.too_long=drop"), build_tokenizer(), 64)
    assert [one.prompt for one in dropped.evaluations["aime"]] == ["a"] and dropped.num_dropped == 1
    with pytest.raises(ValueError, match=r"evaluations.aime.path: .* is in the folder of this very run"):
        check_job(config(tmp_path, *paths, f"evaluations.aime.path={tmp_path}/x/rows.jsonl"), 1)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["evaluations.aime.n=0"], "evaluations.aime.n must be at least 1, not 0"),
        (["evaluations.aime.temperature=0"], "evaluations.aime.temperature must be positive with n=4"),
        (["evaluations.aime.every=-1"], "evaluations.aime.every must not be negative, not -1"),
        (["evaluations.aime.speed=1"], "unknown key evaluations.aime.speed"),
        (["evaluations.other.n=1"], "missing key evaluations.other.path"),
        (['evaluations.other.path=""'], "evaluations.other.path must name a file"),
        (["evaluations=3"], "evaluations must be a table of sections, each with a name, not 3"),
        (["evaluations.aime=3"], "evaluations.aime must be a section, not 3"),
        (["evaluations.a/b.path=x"], "evaluations needs names of letters, digits and _ . -, not 'a/b'"),
        (["checkpoints.best_by=amie"], "checkpoints.best_by must be a name of the table evaluations, which has aime,"),
    ],
)
def test_faults_are_named_by_their_keys(tmp_path, overrides, why):
    with pytest.raises(ValueError) as error:
        config(tmp_path, *overrides)
    assert why in str(error.value)


def test_the_best_model_by_another_evaluation_is_set_aside(tmp_path):
    best = BestModel(tmp_path, "aime")
    found = {"eval_reward_mean": 0.9, best.metric: 0.5}
    best.folder.mkdir()
    for file, text in best.described(2, found, "digest").items():
        (best.folder / file).write_text(text)
    assert not best.is_beaten_by(0.5) and best.is_beaten_by(0.6) and best.set_aside_after(2) is None
    assert BestModel(tmp_path).set_aside_after(2) == tmp_path / "best.1" and best.is_beaten_by(0.0)


def test_settings_of_evaluations_are_kept_and_best_by_alone_is_not_read(tmp_path):
    job = config(tmp_path, "checkpoints.best_by=aime")
    assert settings_of(job)["evaluations"]["aime"]["n"] == 4
    assert unread_settings(job) == ['checkpoints.best_by="aime" (checkpoints.best is false)']
    assert unread_settings(config(tmp_path, "checkpoints.best_by=aime", "checkpoints.best=true")) == []


@pytest.mark.slow
def test_ranks_find_together_what_one_rank_finds_and_keep_the_best_by_name(tmp_path):
    found = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        write(folder / "rows.jsonl", *(f"What is {number} + 1?\n" for number in range(5)))
        common = (
            f"evaluations.sums.path={folder}/rows.jsonl evaluations.sums.n=3 evaluations.sums.temperature=1.0 "
            "evaluations.sums.every=2 checkpoints.best=true checkpoints.best_by=sums train.learning_rate=1e-30"
        )
        run_jobs(folder, num_ranks, {"run": common})
        lines, run = log_of(folder, "run"), folder / "runs/run"
        found.append([line.get("eval_reward_mean/sums") for line in lines])
        best = json.loads((run / "best/evaluation.json").read_text())
        assert best["best_by"] == "sums" and best["step"] == 2 and "eval_reward_mean" not in best
        assert set(json.loads((run / "before.json").read_text())) == {"eval_reward_mean", "eval_reward_mean/sums"}
    assert found[0] == found[1] and [value is None for value in found[0]] == [True, False, False]
