"""Tests of a step's samples: what becomes of those that were cut off, and the parameters that are asked for."""

from __future__ import annotations

import re
import time
from itertools import islice

import pytest
import torch

from lockstep.integration.failures import EngineFailed
from lockstep.integration.grpo.engines.answers import Answer, StepSamples
from lockstep.integration.grpo.engines.rollouts import Rollouts
from lockstep.integration.grpo.results.samples import sample_row
from lockstep.integration.grpo.rewards.score import Score
from lockstep.integration.grpo.rewards.scorer import Scorer
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sampling import RolloutSettings
from lockstep.integration.grpo.settings.sections import RunSettings
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.grpo.tasks.task import Task
from lockstep.integration.ranks import Ranks
from lockstep.rollout.completion import Completion, FinishReason, WeightSpan

RANKS = Ranks(0, 1, torch.device("cpu"))
WHOLE, CUT = FinishReason("stop", matched=2), FinishReason("length", length=2)
ENDS = (WHOLE, CUT, CUT, WHOLE)  # of the samples of a group
LENGTHS = (4, 6, 2, 8)  # of their texts, which are their rewards


class FixedEngine:
    """Answers every prompt with the same group, and keeps what it was asked."""

    service = None

    def __init__(self, *sizes, ends=ENDS):
        """sizes: numbers of the groups that come together."""
        self.asked, self._sizes, self._ends = {}, sizes, ends

    def begin(self, step, asked):
        self.asked[step] = asked

    def groups(self, step, num_groups):
        group = [
            Completion(
                "id", at, (5, 6), (7, 8), "x" * length, (-0.5, -0.25), end, 0, 0, "0", None,
                (WeightSpan("0", None, 0, 2),),
            )
            for at, (end, length) in enumerate(zip(self._ends, LENGTHS, strict=True))
        ]  # fmt: skip
        for size in self._sizes or [num_groups]:
            yield [group] * size


def length(prompt, completion, answer):
    """Reward the length of a text."""
    return len(completion)


CALLS = []


def noted(rows, completions):
    """Reward the length of a text, and keep the rows of each call."""
    CALLS.append([row["prompt"] for row in rows])
    return [len(text) for text in completions]


SLOW_S = 0.02


def slowly(prompt, completion, answer):
    """Take some time."""
    time.sleep(SLOW_S)
    return len(completion)


def sampled(tmp_path, reward=length, ends=ENDS, **train):
    """Return the samples of one step of one prompt, and what the job notes of them."""
    config = JobConfig(
        RunSettings("x", str(tmp_path)),
        rollout=RolloutSettings(prompts_per_step=1, group_size=4, max_new_tokens=2),
        train=TrainSettings(scale_rewards="none", **train),
    )
    problems = [Problem("a", "b")]
    task = Task(lambda step, num: problems[:num], problems, problems)
    noted, engine = StepSamples(), FixedEngine(ends=ends)
    rollouts = Rollouts(config, RANKS, engine, task, Scorer([f"{__name__}:{reward.__name__}"]))
    return list(rollouts.samples(0, noted)), noted, engine


def test_the_seconds_of_rewards_are_not_those_of_the_engine(tmp_path):
    _, noted, _ = sampled(tmp_path, slowly)
    assert noted.scored_s > 4 * SLOW_S and noted.waited_s < noted.scored_s


def test_samples_that_were_cut_off_count_as_all_others(tmp_path):
    samples, noted, engine = sampled(tmp_path)
    assert [one.advantage for one in samples] == noted.advantages == [-1.0, 1.0, -3.0, 3.0]
    assert all(one.counts for one in samples)
    (params,) = engine.asked[0].params
    assert (params.n, params.max_new_tokens) == (4, 2)


def test_masked_samples_are_in_their_groups_mean_and_not_in_the_loss(tmp_path):
    samples, _, _ = sampled(tmp_path, truncated="mask")
    assert [one.advantage for one in samples] == [-1.0, 1.0, -3.0, 3.0]
    assert [one.counts for one in samples] == [True, False, False, True]


def test_the_penalty_of_samples_that_were_cut_off_is_in_advantages_and_not_in_rewards(tmp_path):
    samples, noted, _ = sampled(tmp_path, truncated_penalty=2.0)
    # 4, 4, 0, 8 around their mean of 4
    assert [one.advantage for one in samples] == noted.advantages == [0.0, 0.0, -4.0, 4.0]
    assert [score.total for score in noted.scores] == [4.0, 6.0, 2.0, 8.0]
    assert all(one.counts for one in samples)


@pytest.mark.parametrize(
    ("end", "error", "why"),
    [
        (FinishReason("abort", message="by an administrator"), EngineFailed,
         "sample 1 of 'a' was not finished: by an administrator; start the same job with --resume"),
        (FinishReason("abort"), EngineFailed, "ended by abort after 2 tokens"),
        (FinishReason("ignored", message="it needs 9 blocks and there are 8"), ValueError,
         "sample 1 of 'a': it needs 9 blocks and there are 8: raise engine.kv_cache"),
        (FinishReason("length", length=2, message="the cache is full"), ValueError, "the cache is full: raise engine"),
    ],
)  # fmt: skip
def test_nothing_is_learned_from_answers_that_the_engine_did_not_finish(tmp_path, end, error, why):
    with pytest.raises(error, match=re.escape(why)):
        sampled(tmp_path, ends=(WHOLE, end, CUT, WHOLE))


@pytest.mark.parametrize("sizes", [(3,), (1, 2), (1, 1, 1)])
def test_all_groups_that_are_there_are_scored_in_one_call(tmp_path, sizes):
    config = JobConfig(RunSettings("x", str(tmp_path)), rollout=RolloutSettings(prompts_per_step=3, group_size=4))
    problems = [Problem(name, "") for name in "abc"]
    task = Task(lambda step, num: problems[:num], problems, problems)
    rollouts = Rollouts(config, RANKS, FixedEngine(*sizes), task, Scorer([f"{__name__}:noted"]))
    CALLS.clear()
    into, names = StepSamples(), iter("abc")
    samples = rollouts.samples(0, into)
    # A call comes before the first sample of its groups, and after the last one of those before.
    for number, size in enumerate(sizes):
        for _ in range(4 * size):
            next(samples)
        assert CALLS[number:] == [[name for name in islice(names, size) for _ in range(4)]]
    assert next(samples, None) is None and [one.prompt for one in into.problems] == list("aaaabbbbcccc")
    assert [score.total for score in into.scores] == [4.0, 6.0, 2.0, 8.0] * 3


def test_tokens_that_a_grammar_forced_do_not_count_and_are_kept_in_the_files():
    done = Completion(
        "id", 0, (5, 6), (7, 8), "x", (-0.5, -0.25), WHOLE, 0, 0, "0", None, (WeightSpan("0", None, 0, 2),),
        forced=(True, False),
    )  # fmt: skip
    assert [one.mask for one in Answer(done, Score(1.0)).samples(0, 1.0, counts=True)] == [[False, True]]
    assert [one.mask for one in Answer(done, Score(1.0)).samples(0, 1.0, counts=False)] == [[False, False]]
    assert sample_row(Problem("a", "b"), done, Score(1.0), 0.5)["forced"] == (True, False)
