"""Rewards and data of other packages: what they give, their limits, off the main thread, and what is refused."""

from __future__ import annotations

import json
import logging
import threading
import time

import pytest

from lockstep.integration.grpo.rewards import ready
from lockstep.integration.grpo.rewards.loading import load_reward
from lockstep.integration.grpo.rewards.ready import follows_schema
from lockstep.integration.grpo.rewards.scorer import Scorer
from lockstep.integration.grpo.rewards.scoring_process import ScoringProcess
from lockstep.integration.grpo.settings.config import load_config
from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.grpo.tasks.gym import gym_problems
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.grpo.tasks.task import build_task
from lockstep.rollout.completion import Completion, FinishReason

math_verify, reasoning_gym = load_reward("math_verify"), load_reward("reasoning_gym")
ENTRY = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {"source_dataset": "chain_sum"}}
COUNTDOWN = {"source_dataset": "countdown", "numbers": [6, 61, 94, 4], "target": 309}
ENDLESS = "The answer is $9^{9^{9^{9}}}$"


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("so it is $\\boxed{\\frac{2}{4}}$", "0.5", 1.0),
        ("The answer is 1,234.", "1234", 1.0),
        ("$\\boxed{(1, 2)}$", "(1,2)", 1.0),
        ("First 7, then the answer is 8.", "$8$", 1.0),
        ("The answer is 0.51.", "\\frac12", 0.0),
        ("I do not know", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(completion, answer, value):
    assert math_verify("q", completion, answer) == value


def test_an_answer_that_is_no_mathematics_is_refused_by_name():
    with pytest.raises(ValueError, match="the answer '' is no mathematical expression"):
        math_verify("q", "3", "")


def test_a_scorer_that_takes_too_long_gives_0_off_the_main_thread_too():
    found = []

    def score():
        began = time.perf_counter()
        found.append(math_verify("q", ENDLESS, "3", limit_s=0.5))
        found.append(time.perf_counter() - began)
        found.append(math_verify("q", "The answer is 3.", "3"))

    math_verify("q", "1", "1")  # the process has started
    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert found[0] == 0.0 and found[1] < 15 and found[2] == 1.0


def test_a_process_that_was_killed_starts_again():
    math_verify("q", "1", "1")
    ready._OTHER._process.kill()
    ready._OTHER._process.wait()
    assert math_verify("q", "The answer is 2.", "2") == 1.0


def test_a_scorer_that_fails_gives_0_and_is_logged_once(caplog):
    process = ScoringProcess()
    try:
        with caplog.at_level(logging.WARNING):
            values = [process.score("reasoning_gym", ("1", "chain_sum", 5, ""), 5.0) for _ in range(2)]
    finally:
        process.close()
    assert values == [0.0, 0.0] and len(caplog.records) == 1 and "TypeError" in caplog.text


@pytest.mark.parametrize(
    ("row", "completion", "value"),
    [
        (ENTRY, " -4\n", 1.0),
        (ENTRY, "I think <answer>-4</answer>", 1.0),
        (ENTRY, "4", 0.0),
        ({"prompt": "x", "dataset": "chain_sum", "entry": ENTRY}, "-4", 1.0),
        ({"answer": "94*4 - 61 - 6", "metadata": COUNTDOWN}, "4*94 - 6 - 61", 1.0),  # other than the answer, and right
    ],
)
def test_reasoning_gym_scores_an_entry_by_its_dataset(row, completion, value):
    assert reasoning_gym(row, completion) == value


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"answer": "1"}, {}, "the row is no entry of a Reasoning Gym dataset"),
        ({"answer": "1", "metadata": {}}, {}, "the row names no dataset of Reasoning Gym"),
        ({"answer": "1", "metadata": {}}, {"dataset": "chain_sun"}, "Reasoning Gym has no dataset 'chain_sun'"),
    ],
)
def test_rows_that_are_no_entries_are_refused(row, options, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym(row, "1", **options)


def test_both_are_rewards_by_name_with_options_and_successes():
    problem = Problem("4 - 1 - 7 =", "-4", "chain_sum[0]", ENTRY)
    done = [Completion("id", 0, (1,), (2,), text, (-0.5,), FinishReason("stop"), 0, 0, "0", None, ())
            for text in ("-4", "4")]  # fmt: skip
    options = {"reasoning_gym": {"tag": "final", "limit_s": 2.0}}
    scores = Scorer(["math_verify", "reasoning_gym"], {"math_verify": 0.5}, options)([problem] * 2, done)
    assert [one.total for one in scores] == [1.5, 0.0] and [one.is_success for one in scores] == [True, False]


@pytest.mark.parametrize(
    ("name", "extra"), [("math_verify", "rewards"), ("reasoning_gym", "rewards"), ("follows_schema", "train")]
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, extra):
    monkeypatch.setitem(ready.PACKAGES, name, "no_such_package")
    with pytest.raises(ValueError, match=rf"reward '{name}' needs no-such-package, the extra `{extra}`: pip install"):
        load_reward(name)


NESTED = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("schema", "completion", "value"),
    [
        (NESTED, "[" * 20 + "]" * 20, 1.0),
        (NESTED, "[" * 900 + "]" * 900, 0.0),  # deeper than the comparison
        (NESTED, "[" * 100_000 + "]" * 100_000, 0.0),  # deeper than the parser
        ({"multipleOf": 0.01}, "1" + "0" * 400, 0.0),  # beyond floating point
        ({"multipleOf": 0.01}, "1" + "0" * 5000, 0.0),  # beyond Python's limit of digits
        ({"multipleOf": 1}, "1e400", 0.0),
        ({"multipleOf": 0.5}, "1.5", 1.0),
        ({}, "NaN", 0.0),
        ({"type": "object"}, '{"a": -Infinity}', 0.0),
        (True, "null", 1.0),
        (False, "null", 0.0),
    ],
)
def test_no_completion_ends_a_job_by_its_schema_and_only_json_is_json(schema, completion, value):
    assert follows_schema({"schema": schema}, completion) == value
    assert follows_schema({}, completion, schema=json.dumps(schema)) == value


def test_a_pattern_of_a_schema_that_takes_too_long_gives_0():
    schema, begins = {"type": "string", "pattern": "^(a+)+$"}, time.perf_counter()
    scores = [follows_schema({"schema": schema}, json.dumps("a" * num + "b"), limit_s=0.5) for num in (3, 60)]
    assert scores == [0.0, 0.0] and time.perf_counter() - begins < 60
    assert follows_schema({"schema": schema}, '"aaa"') == 1.0


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "none"}, "the schema is wrong: 'none' is not valid"),
        ({"pattern": "("}, "the schema is wrong: "),
        ({"$ref": "#/nowhere"}, "the schema is wrong: .*nowhere"),
        ({"const": {1, 2}}, "the schema is wrong: .*not JSON serializable"),
        ([1], "the schema is wrong: an object is needed, not a list"),
        ("{", "the schema is wrong: Expecting property name"),
    ],
)
def test_a_schema_that_is_wrong_or_refers_to_nothing_is_refused(schema, message):
    for completion in ("1", '"text"'):
        with pytest.raises(ValueError, match=message):
            follows_schema({"schema": schema}, completion)


def config(tmp_path, *overrides):
    path = tmp_path / "job.toml"
    path.write_text('reward = "reasoning_gym"\n[run]\nname = "x"\nseed = 3\n[data]\nreasoning_gym = "chain_sum"\n')
    return load_config(path, ["data.reasoning_gym_options={ size = 40, max_terms = 3 }", *overrides])


def test_a_dataset_of_reasoning_gym_is_data_of_a_job(tmp_path):
    task = build_task(config(tmp_path), build_tokenizer(), 64)
    assert (len(task.heldout), len(task.all_known)) == (4, 40)
    first = task.train_problems(0, 5)[0]
    row = first.whole_row()
    assert (first.prompt, first.answer) == (row["question"], row["answer"]) and first.source.startswith("chain_sum[")
    assert all(one.row["metadata"]["num_terms"] <= 3 for one in task.all_known)
    assert all(reasoning_gym(one.whole_row(), one.answer) == 1.0 for one in task.heldout)
    again = build_task(config(tmp_path), build_tokenizer(), 64)
    other = build_task(config(tmp_path, "run.seed=4"), build_tokenizer(), 64)
    assert [one.prompt for one in again.all_known] == [one.prompt for one in task.all_known]
    assert [one.prompt for one in other.all_known] != [one.prompt for one in task.all_known]
    assert json.loads(json.dumps(row)) is not None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sun", {}, r"Reasoning Gym has no dataset 'chain_sun' \(is it 'chain_sum'\?\)"),
        ("chain_sum", {"sizze": 3}, r"data\.reasoning_gym_options: .*'sizze'"),
        ("chain_sum", {"min_terms": 30}, r"data\.reasoning_gym_options: max_terms must be >= min_terms"),
    ],
)
def test_a_wrong_dataset_or_option_is_named_by_its_key(name, options, message):
    with pytest.raises(ValueError, match=message):
        gym_problems(name, options, 0)


def test_keys_of_data_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.reasoning_gym must not be set with data\.path"):
        config(tmp_path, "data.path=rows.jsonl")
    with pytest.raises(ValueError, match=r"data\.reasoning_gym_options needs data\.reasoning_gym"):
        config(tmp_path, "data.reasoning_gym=''")
    assert config(tmp_path, "data.chat=true", 'data.system_prompt="Answer in <answer> tags."').data.chat
