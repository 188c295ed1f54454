"""Tests of the samples that a run keeps, and of the numbers that say what was sampled."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lockstep.integration.grpo.results.samples import (
    SampleFiles,
    UnreadableSamples,
    packed,
    read_samples,
    sample_path,
    sample_row,
    saved_steps,
    shown,
)
from lockstep.integration.grpo.results.statistics import (
    LengthPenalty,
    SampleNumbers,
    numbers_of,
    pass_at_k,
    step_statistics,
)
from lockstep.integration.grpo.rewards.score import Score
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.rollout.completion import Completion, FinishReason, WeightSpan

TEXT = "a\x1b[2J\u2028\ud800 end"
SPANS = (WeightSpan("3", None, 0, 2),)
ANSWER = Completion(
    "id", 1, (5, 6), (7, 8), TEXT, (-0.5, -0.25), FinishReason("length", length=2), 0, 0, "3", None, SPANS
)
SCORE = Score(0.5, {"short": 1.0}, False)
ROW = sample_row(Problem("2+2?", "4", "rows:7"), ANSWER, SCORE, -1.0, temperature=0.7)


def test_a_step_of_samples_is_read_as_it_was_written(tmp_path):
    SampleFiles(tmp_path, 0, 0).write(40, [packed([ROW, ROW])])
    assert sample_path(tmp_path, 40) == tmp_path / "rollouts/step-000040.jsonl.zst"
    row, same = read_samples(tmp_path, 40)
    assert row == same == {
        "source": "rows:7", "prompt": "2+2?", "answer": "4", "sample": 1, "text": TEXT, "reward": 0.5,
        "components": {"short": 1.0}, "is_success": False, "advantage": -1.0, "finish_reason": "length",
        "prompt_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-0.5, -0.25], "temperature": 0.7,
        "weight_versions": [["3", 0, 2]],
    }  # fmt: skip
    with pytest.raises(ValueError, match="has no samples of step 41: it has steps 40 to 40"):
        read_samples(tmp_path, 41)
    whole = sample_path(tmp_path, 40).read_bytes()
    for part in (whole[:-4], whole[: len(whole) // 2]):
        sample_path(tmp_path, 40).write_bytes(part)
        with pytest.raises(ValueError, match=r"step-000040.jsonl.zst cannot be read: it is cut off"):
            read_samples(tmp_path, 40)
    SampleFiles(tmp_path, 0, 40).write(40, [packed([ROW, {**ROW, "reward": "much", "prompt_ids": None}])])
    with pytest.raises(ValueError, match="line 2 is no sample: prompt_ids is no list, reward is no number"):
        read_samples(tmp_path, 40)
    sample_path(tmp_path, 40).write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"step-000040.jsonl.zst cannot be read"):
        read_samples(tmp_path, 40)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_the_groups_of_a_step_are_read_one_after_another(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("lockstep.integration.grpo.results.samples._CHUNK", chunk)
    groups = [[{**ROW, "sample": 2 * at}, {**ROW, "sample": 2 * at + 1}] for at in range(3)]
    SampleFiles(tmp_path, 0, 0).write(1, [packed(group) for group in groups])
    assert [row["sample"] for row in read_samples(tmp_path, 1)] == list(range(6))
    path = sample_path(tmp_path, 1)
    whole = path.read_bytes()
    for data in (whole[:-1], whole + b"\x28", b""):
        path.write_bytes(data)
        with pytest.raises(UnreadableSamples, match="cannot be read"):
            read_samples(tmp_path, 1)


def test_the_newest_steps_are_kept_and_a_resumed_run_drops_later_ones(tmp_path):
    files = SampleFiles(tmp_path, 2, 0)
    for step in (1, 2, 3, 12):
        files.write(step, [packed([ROW])])
    assert saved_steps(tmp_path) == [3, 12]
    SampleFiles(tmp_path, 2, 5)
    assert saved_steps(tmp_path) == [3]


def test_files_that_cannot_be_written_are_reported_once_and_end_nothing(tmp_path, caplog):
    (tmp_path / "rollouts").write_text("no folder")
    files = SampleFiles(tmp_path, 2, 0)
    files.write(1, [packed([ROW])])
    files.write(2, [packed([ROW])])
    assert caplog.text.count("samples end before") == 1 and "the run goes on" in caplog.text


def test_no_text_of_the_models_controls_the_terminal():
    text = shown(ROW)
    assert text == (
        "--- rows:7 #1: reward 0.5 (short 1), 2 tokens, ended by length\n2+2?\n>>> a\\x1b[2J\\u2028\\ud800 end"
    )


@pytest.mark.parametrize(
    ("num_tokens", "end", "expected"),
    [
        (6, "stop", 0.0),
        (7, "stop", 0.5),
        (9, "stop", 1.5),
        (10, "stop", 2.0),  # by itself, with the last token
        (10, "length", 2.0),
        (4, "length", 2.0),  # of an answer that something else has cut
    ],
)
def test_the_penalty_grows_evenly_over_the_last_tokens(num_tokens, end, expected):
    answer = replace(ANSWER, token_ids=(1,) * num_tokens, finish_reason=FinishReason(end))
    assert LengthPenalty(2.0, 4, 10).of(answer) == expected
    assert LengthPenalty(2.0, 0, 10).of(answer) == (2.0 if end == "length" else 0.0)


def test_statistics_of_a_step_are_those_computed_by_hand():
    assert numbers_of(ANSWER, Score(0.5, {"short": 1.0}, False)) == SampleNumbers(
        2, -0.75, True, 0.5, 0.5, {"short": 1.0}, False
    )
    assert numbers_of(ANSWER, Score(0.5), LengthPenalty(0.75)) == SampleNumbers(2, -0.75, True, 0.5, -0.25, {}, None)
    samples = [
        SampleNumbers(2, -1.0, False, 1.0, 1.0, {"a": 1.0}, True),
        SampleNumbers(4, -2.0, True, 0.0, 0.0, {"a": 0.0}, False),
        SampleNumbers(6, -3.0, False, 0.0, 0.1 + 0.2, {"a": 3.0}, False),
        SampleNumbers(8, -6.0, True, 0.0, 0.3, {"a": 0.0}, False),  # equal in the float32 of advantages
    ]  # fmt: skip
    assert step_statistics(samples, 2) == {
        "reward_std": math.sqrt(0.1875), "flat_groups": 0.5, "length_mean": 5.0, "length_min": 2, "length_max": 8,
        "truncated_share": 0.5, "entropy": 0.6, "reward/a": 1.0, "success": 0.25, "pass@2": 0.5,
    }  # fmt: skip
    named = [replace(one, source_name=name) for one, name in zip(samples, "bbaa", strict=True)]
    of_sources = {"source/a/reward_mean": 0.0, "source/a/success": 0.0, "source/b/reward_mean": 0.5}
    assert step_statistics(named, 2) == {**step_statistics(samples, 2), **of_sources, "source/b/success": 0.5}
    unnamed = [SampleNumbers(1, -1.0, False, 1.0, 1.0, {}, None)] * 2
    assert set(step_statistics(unnamed, 2)).isdisjoint({"success", "pass@2"})


def test_pass_at_k_is_the_share_of_draws_of_k_samples_with_a_success():
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(4, 0, 4) == 0.0 and pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    for wrong in ((4, 1, 5), (4, 5, 1), (4, 1, 0)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at_k(*wrong)
