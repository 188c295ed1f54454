"""Sampling settings of a job: where they reach, what is refused by its key, and the warning of what distorts a draw."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from lockstep.integration.grpo import main as grpo
from lockstep.integration.grpo.evaluation import Evaluation
from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.planning.description import describe_plan
from lockstep.integration.grpo.planning.sampling_check import distortion_warning, distortions
from lockstep.integration.grpo.results.samples import read_samples
from lockstep.integration.grpo.settings.config import JobConfig, load_config
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.ranks import Ranks
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.job_launcher import log_of, run_jobs

RANKS = Ranks(0, 1, torch.device("cpu"))
CONFIG = Path(__file__).parents[3] / "configs" / "arithmetic_cpu.toml"
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
TABLE = """
[rollout.sampling]
stop = ["\\n", "END"]
stop_token_ids = [7]
top_p = 0.9
top_k = 20
min_p = 0.01
frequency_penalty = 0.5
min_new_tokens = 2
ignore_eos = true
logit_bias = { 5 = -1.5 }
json_schema = { type = "object", properties = { sum = { type = "integer" } }, required = ["sum"] }
"""


def config(tmp_path: Path, *overrides: str, table: str = "") -> JobConfig:
    path = tmp_path / "job.toml"
    path.write_text(f'[run]\nname = "x"\nseed = 3\ndir = "{tmp_path}"\n[rollout]\nmax_new_tokens = 12\n{table}')
    return load_config(path, overrides)


def test_a_table_of_sampling_settings_is_in_the_parameters_of_a_step(tmp_path):
    params = config(tmp_path, "rollout.group_size=4", "rollout.temperature=0.8", table=TABLE).rollout.params(11)
    assert params == SamplingParams(
        n=4, temperature=0.8, max_new_tokens=12, sampling_seed=11, stop=("\n", "END"), stop_token_ids=(7,), top_p=0.9,
        top_k=20, min_p=0.01, frequency_penalty=0.5, min_new_tokens=2, ignore_eos=True, logit_bias={5: -1.5},
        json_schema=json.dumps(SCHEMA),
    )  # fmt: skip


def test_settings_of_the_command_line_replace_those_of_the_table(tmp_path):
    found = config(tmp_path, "rollout.sampling.top_p=0.5", 'rollout.sampling.stop="."', table=TABLE).rollout.sampling
    assert (found["top_p"], found["stop"], found["top_k"]) == (0.5, ".", 20)


def test_evaluations_have_them_with_their_own_temperature_and_number(tmp_path):
    asked = []

    def answer(problems, params):
        asked.extend(params)
        raise InterruptedError  # nothing more is needed

    job = config(tmp_path, "eval.n=2", "eval.temperature=0.5", 'rollout.sampling.stop="."', "rollout.temperature=0.9")
    with pytest.raises(InterruptedError):
        Evaluation(job, RANKS, [Problem("a", "b")], answer).run()
    [params] = asked
    assert (params.n, params.temperature, params.max_new_tokens, params.stop) == (2, 0.5, 12, (".",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("n=4", "rollout.sampling.n must not be set: it is rollout.group_size"),
        ("sampling_seed=4", "rollout.sampling.sampling_seed must not be set: it is run.seed"),
        ("temperature=0.4", "rollout.sampling.temperature must not be set: it is rollout.temperature"),
        ("max_new_tokens=4", "rollout.sampling.max_new_tokens must not be set: it is rollout.max_new_tokens"),
        ("topp=0.4", "rollout.sampling.topp is no field of SamplingParams (is it rollout.sampling.top_p?)"),
        ("zzz=1", "rollout.sampling.zzz is no field of SamplingParams"),
        ("top_p=1.5", "rollout.sampling.top_p must be a number in (0, 1], not 1.5"),
        ("top_k=0.5", "rollout.sampling.top_k must be -1 or an integer of 1 or more, not 0.5"),
        ("stop=[1]", "rollout.sampling.stop must be a non-empty string"),
        ("min_new_tokens=13", "rollout.sampling.min_new_tokens 13 exceeds max_new_tokens 12"),
        ('stop_regex="("', "rollout.sampling.stop_regex '(': "),
        ("ignore_eos=1", "rollout.sampling.ignore_eos must be true or false, not 1"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_by_its_key_when_the_config_is_read(tmp_path, override, message):
    with pytest.raises(ValueError) as caught:
        config(tmp_path, f"rollout.sampling.{override}")
    assert message in str(caught.value)


def test_all_wrong_settings_are_named_at_once_and_two_grammars_refused(tmp_path):
    with pytest.raises(ValueError) as caught:
        config(tmp_path, "rollout.sampling.top_p=7", "rollout.sampling.n=2", "rollout.sampling.min_p=-1")
    assert all(f"rollout.sampling.{name} must" in str(caught.value) for name in ("top_p", "n", "min_p"))
    with pytest.raises(ValueError, match=r"rollout\.sampling\.regex, ebnf: only one of them"):
        config(tmp_path, 'rollout.sampling.regex="a"', 'rollout.sampling.ebnf="root ::= x"')


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("logit_bias={ 500 = 1.0 }", "rollout.sampling.logit_bias names tokens [500], but the vocabulary ends at 127"),
        ("stop_token_ids=[128, 5]", "rollout.sampling.stop_token_ids names tokens [128], but the vocabulary ends at"),
        ('regex="(a"', "rollout.sampling.regex: "),
        ('json_schema={ type = "nothing" }', "rollout.sampling.json_schema: "),
    ],
)
def test_a_setting_that_the_model_cannot_have_is_named_at_the_plan(tmp_path, override, message):
    job = load_config(CONFIG, [f"run.dir={tmp_path}", f"rollout.sampling.{override}"])
    with pytest.raises(ValueError) as caught:
        check_job(job, 2)
    assert str(caught.value).startswith(message)


def test_the_plan_warns_of_what_distorts_the_draws_and_of_nothing_else(tmp_path, capsys):
    quiet = ['rollout.sampling.stop="x"', "rollout.sampling.ignore_eos=true", "rollout.sampling.top_p=1"]
    job = load_config(CONFIG, [f"run.dir={tmp_path}", *quiet])
    assert distortions(job) == [] and distortion_warning(job) == "" and "warning" not in describe_plan(job, 2)
    loud = ["top_p=0.9", "top_k=3", "min_p=0.1", "frequency_penalty=1", "presence_penalty=1", "repetition_penalty=1.5",
            "logit_bias={ 5 = 1.0 }", "min_new_tokens=2", 'regex="[0-9]+"']  # fmt: skip
    job = load_config(CONFIG, [f"run.dir={tmp_path}", *(f"rollout.sampling.{one}" for one in loud)])
    names = [one.partition(":")[0].removeprefix("rollout.sampling.") for one in distortions(job)]
    assert names == [one.partition("=")[0] for one in loud]
    overrides = [f"run.dir={tmp_path}", "run.num_ranks=0", "rollout.sampling.top_k=3"]
    assert grpo.main([str(CONFIG), *overrides, "--check"]) == 0
    plan = capsys.readouterr().out
    assert plan.count("rollout.sampling.top_k: less likely tokens are never drawn") == 1 and "top_k=3" in plan


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_warns_once_before_the_job_starts(tmp_path, monkeypatch, caplog, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(grpo, "_run", lambda config, rank, *, resume: 0)
    overrides = [f"run.dir={tmp_path}", "run.num_ranks=0", "rollout.sampling.top_k=3"]
    with caplog.at_level(logging.WARNING):
        assert grpo.main([str(CONFIG), *overrides]) == 0
    assert sum("rollout.sampling.top_k" in one.getMessage() for one in caplog.records) == (rank == "0")


def test_a_grammar_and_a_run_that_is_repeated_by_its_schedule_do_not_go_together(tmp_path):
    with pytest.raises(ValueError, match=r"rollout\.sampling\.regex must not be set with run\.replay_schedule"):
        config(
            tmp_path, "run.replay_schedule=s.jsonl", "rollout.ahead=1", "rollout.on_commit=keep",
            'rollout.sampling.regex="a+"',
        )  # fmt: skip


@pytest.mark.slow
def test_a_job_with_a_grammar_masks_forced_tokens_and_is_the_same_ahead_of_training(tmp_path):
    common = "rollout.sampling.regex=is[0-9]{2,4}(ok|no) rollout.max_new_tokens=12 train.learning_rate=2e-3"
    runs = {"plain": "", "shared": "rollout.ahead=1", "separate": "sync=tensor engines=separate rollout.ahead=1"}
    run_jobs(tmp_path, 1, {name: f"{common} {more}" for name, more in runs.items()})
    lines = {name: [(x["weight_digest"], x["loss"], x["logprob_gap"]) for x in log_of(tmp_path, name)] for name in runs}
    assert lines["shared"] == lines["separate"] == lines["plain"] and len(set(lines["plain"])) == 3
    assert all(gap == 0.0 for _, _, gap in lines["plain"])
    rows = read_samples(tmp_path / "runs/plain", 1)
    assert all(len(row["forced"]) == len(row["token_ids"]) and row["forced"][:2] == [True, True] for row in rows)
    assert all(row["text"].startswith("is") and not all(row["forced"]) for row in rows)
