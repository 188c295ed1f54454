"""Dynamic sampling: groups without spread are replaced by groups of other prompts, the same on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lockstep.integration.grpo.engines.answers import StepSamples
from lockstep.integration.grpo.engines.rollouts import Rollouts
from lockstep.integration.grpo.results.samples import read_samples
from lockstep.integration.grpo.results.statistics import step_statistics
from lockstep.integration.grpo.rewards.scorer import Scorer
from lockstep.integration.grpo.settings.config import JobConfig, load_config
from lockstep.integration.grpo.settings.sampling import RolloutSettings
from lockstep.integration.grpo.settings.sections import EngineSettings, ParallelSettings, RunSettings
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.tasks.arithmetic import ArithmeticSpec, arithmetic_problems, operands
from lockstep.integration.grpo.tasks.problems import Problem, draw_problems
from lockstep.integration.grpo.tasks.task import Task
from lockstep.integration.ranks import Ranks
from lockstep.kernels.sampling.draws import derive_seed
from lockstep.rollout.completion import Completion, FinishReason, WeightSpan
from lockstep.tests.support.job_launcher import log_of, run_jobs

PROBLEMS = [Problem(f"p{number}", "") for number in range(12)]
STOP = FinishReason("stop", matched=2)
SAME = ("reward_mean", "loss", "grad_norm", "eval_reward_mean", "weight_version", "weight_digest", "logprob_gap",
        "redrawn_groups", "stayed_flat", "flat_groups")  # fmt: skip
COIN = """
def coin(prompt, completion, answer):
    return float(sum(map(ord, completion)) % 2)
"""


@dataclass(frozen=True)
class TwoRanks(Ranks):
    """One of two ranks, whose sums have what the other one adds."""

    other: tuple[float, ...] = (0, 0, 0)

    def total(self, value):
        return value + next(self._others)

    def begun(self):
        object.__setattr__(self, "_others", iter(self.other))
        return self


class OneRank(Ranks):
    """The only rank, whose sums need no process group."""

    def total(self, value):
        return value


class CountingEngine:
    """Answers each prompt with texts that its row of `texts` lists, and keeps what it was asked."""

    service = None

    def __init__(self, texts):
        self._texts, self.asked = texts, []

    def begin(self, step, asked):
        self.asked.append((asked.prompts, [one.sampling_seed for one in asked.params]))

    def groups(self, step, num_groups):
        yield [[self._completion(prompt, at) for at in range(2)] for prompt in self.asked[-1][0]]

    def generate(self, prompts, params):
        self.asked.append((list(prompts), [one.sampling_seed for one in params]))
        return [self._completion(prompt, at) for prompt in prompts for at in range(2)]

    def _completion(self, prompt, at):
        text = self._texts[prompt][at]
        spans = (WeightSpan("0", None, 0, 2),)
        reason = FinishReason("length") if text.endswith("-") else STOP
        return Completion("id", at, (5,), (7, 8), text, (-0.5, -0.25), reason, 0, 0, "0", None, spans)


def length(prompt, completion, answer):
    """Reward the length of a text."""
    return len(completion)


def by_attempt(step, num, attempt=0):
    """Give each attempt four problems of its own."""
    return PROBLEMS[4 * attempt : 4 * attempt + num]


def sampled(tmp_path, ranks, texts, redraw=2, **settings):
    """Return one step's samples, what the job notes of them, and what the engine was asked."""
    rollouts, engine = rollouts_of(tmp_path, ranks, texts, redraw, **settings)
    noted = StepSamples()
    return list(rollouts.samples(3, noted)), noted, engine.asked


def rollouts_of(tmp_path, ranks, texts, redraw, truncated_penalty=0.0, **settings):
    config = JobConfig(
        RunSettings("x", str(tmp_path), seed=5), rollout=RolloutSettings(4, 2, 2, redraw=redraw),
        train=TrainSettings(scale_rewards="none", truncated_penalty=truncated_penalty), **settings,
    )  # fmt: skip
    engine = CountingEngine(texts)
    reward = Scorer([f"{__name__}:length"])
    return Rollouts(config, ranks, engine, Task(by_attempt, PROBLEMS, PROBLEMS), reward), engine


# The groups of p1 and p2 have no spread; of those in their places, p5 has some, p6 none, and p10 has some.
TEXTS = {f"p{number}": ("a", "aaa") for number in range(12)} | dict.fromkeys(("p1", "p2", "p6"), ("aa", "aa"))


def test_groups_without_spread_are_drawn_again_from_other_prompts(tmp_path):
    ranks = TwoRanks(0, 1, torch.device("cpu")).begun()
    samples, noted, asked = sampled(tmp_path, ranks, TEXTS)
    assert asked == [
        (["p0", "p1", "p2", "p3"], [derive_seed(5, 3, index) for index in range(4)]),
        (["p5", "p6"], [derive_seed(5, 3, index, 1) for index in (1, 2)]),
        (["p10"], [derive_seed(5, 3, 2, 2)]),
    ]
    assert [one.prompt for one in noted.problems] == ["p0", "p0", "p5", "p5", "p10", "p10", "p3", "p3"]
    assert [one.advantage for one in samples] == noted.advantages == [-1.0, 1.0] * 4
    assert (noted.num_redrawn, noted.num_flat, noted.num_discarded_tokens) == (3, 0, 12)


def test_attempts_end_and_flat_groups_that_are_left_stay(tmp_path):
    ranks = TwoRanks(0, 1, torch.device("cpu")).begun()
    _, noted, asked = sampled(tmp_path, ranks, TEXTS, redraw=1)
    assert [prompts for prompts, _ in asked] == [["p0", "p1", "p2", "p3"], ["p5", "p6"]]
    assert (noted.num_redrawn, noted.num_flat, noted.num_discarded_tokens) == (2, 1, 8)
    _, noted, asked = sampled(tmp_path, Ranks(0, 1, torch.device("cpu")), TEXTS, redraw=0)  # calls no collective
    assert len(asked) == 1 and (noted.num_redrawn, noted.num_flat) == (0, 0)


def test_the_metrics_count_as_flat_what_is_drawn_again_and_has_no_advantage(tmp_path):
    # Less a penalty of 1 for what was cut off ("-"), p0 has spread, and p1 none.
    texts = TEXTS | {"p0": ("aa", "a-"), "p1": ("aa", "aa-")} | dict.fromkeys(("p2", "p5"), ("aa", "aa"))
    for penalty, num_flat, redrawn in ((1.0, 2, ["p5", "p6"]), (0.0, 1, ["p4", "p6"])):
        rollouts, engine = rollouts_of(tmp_path, OneRank(0, 1, torch.device("cpu")), texts, 1, penalty)
        noted = StepSamples()
        list(rollouts.samples(3, noted))
        assert engine.asked[1][0] == redrawn
        flat = step_statistics(rollouts.numbers(noted), 2)["flat_groups"]
        assert 4 * flat == noted.num_flat == sum(not any(noted.advantages[at : at + 2]) for at in (0, 2, 4, 6))
        assert noted.num_flat == num_flat


def test_ranks_draw_what_one_rank_draws_and_sum_together_until_none_has_a_flat_group(tmp_path):
    cpu = torch.device("cpu")
    _, first, asked = sampled(tmp_path, TwoRanks(0, 2, cpu, (1, 0)).begun(), TEXTS)  # of p0 and p2
    assert asked[1:] == [(["p6"], [derive_seed(5, 3, 2, 1)]), (["p10"], [derive_seed(5, 3, 2, 2)])]
    ranks = TwoRanks(1, 2, cpu, (1, 1)).begun()
    _, second, asked = sampled(tmp_path, ranks, TEXTS)  # of p1 and p3
    assert asked[1:] == [(["p5"], [derive_seed(5, 3, 1, 1)])] and next(ranks._others, None) is None
    assert [one.prompt for one in first.problems[::2] + second.problems[::2]] == ["p0", "p10", "p5", "p3"]


def test_ranks_that_share_an_engine_generate_together_whichever_has_flat_groups(tmp_path):
    ranks = TwoRanks(1, 2, torch.device("cpu"), (1, 1)).begun()
    _, _, asked = sampled(tmp_path, ranks, TEXTS, parallel=ParallelSettings(tp=2), engine=EngineSettings(k_blocks=2))
    assert asked[1:] == [(["p5"], [derive_seed(5, 3, 1, 1)]), ([], [])]


def test_other_problems_of_a_file_are_none_of_the_steps_own_and_follow_from_step_and_attempt():
    problems = [Problem(str(number), "") for number in range(30)]
    own = {one.prompt for one in draw_problems(problems, 1, 7, 8)}
    drawn = [[one.prompt for one in draw_problems(problems, 1, 7, 8, attempt)] for attempt in (1, 2)]
    assert len({*drawn[0], *drawn[1]}) == 16 and not own & {*drawn[0], *drawn[1]}
    assert drawn[0] == [one.prompt for one in draw_problems(problems, 1, 7, 8, 1)]
    assert drawn[0] != [one.prompt for one in draw_problems(problems, 2, 7, 8, 1)]
    assert drawn[0] != [one.prompt for one in draw_problems(problems, 1, 8, 8, 1)]
    assert len(draw_problems(problems[:3], 0, 0, 8, 1)) == 8  # a list that has no others


def test_other_sums_are_none_of_the_steps_own():
    data = arithmetic_problems(ArithmeticSpec(seed=2, num_heldout=8))
    drawn = [tuple(sorted(operands(one))) for attempt in range(3) for one in data.train_problems(4, 50, attempt)]
    assert len(set(drawn)) == 150
    assert data.train_problems(4, 50) == data.train_problems(4, 50, 0)


def test_what_cannot_keep_the_run_of_its_weights_is_refused_by_name(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[run]\nname = "x"\n[rollout]\nredraw = 2\nahead = 1\n')
    assert load_config(path).rollout.redraw == 2
    assert load_config(path, ["rollout.on_commit=keep", "rollout.ahead=0"]).rollout.redraw == 2
    for rule in ("keep", "drop"):
        with pytest.raises(ValueError, match=f'rollout.redraw must be 0 with rollout.ahead and .*on_commit="{rule}"'):
            load_config(path, [f"rollout.on_commit={rule}"])
    with pytest.raises(ValueError, match=r"rollout\.redraw must not be negative, not -1"):
        load_config(path, ["rollout.redraw=-1"])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_runs_ahead_redraw_what_the_run_without_redraws(tmp_path, num_ranks):
    (tmp_path / "coin.py").write_text(COIN)
    common = (
        f"reward=coin:coin run.num_steps=5 rollout.group_size=2 rollout.redraw=2 rollout.max_new_tokens=10 "
        f"train.learning_rate=2e-3 rollout.sampling.stop_token_ids=[{','.join(map(str, range(4, 14)))}]"
    )
    runs = {
        "plain": "", "shared": "rollout.ahead=2", "separate": "sync=tensor engines=separate rollout.ahead=1",
        **({"tp2": "parallel.tp=2 rollout.ahead=1"} if num_ranks == 2 else {}),
    }  # fmt: skip
    run_jobs(tmp_path, num_ranks, {name: f"{common} {more}" for name, more in runs.items()})
    lines = {name: [{key: line.get(key) for key in SAME} for line in log_of(tmp_path, name)] for name in runs}
    plain = lines["plain"]
    assert sum(line["redrawn_groups"] for line in plain) > 5 and any(line["stayed_flat"] for line in plain)
    assert all(line["stayed_flat"] == 4 * line["flat_groups"] for line in plain)
    assert all(line["logprob_gap"] == 0.0 for line in plain) and len({line["weight_digest"] for line in plain}) > 3
    for name in runs:
        assert lines[name] == plain, name


@pytest.mark.slow
def test_any_number_of_ranks_redraws_the_same(tmp_path):
    found = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        (folder / "coin.py").write_text(COIN)
        # No update: then all steps have the same weights, on any number of ranks.
        common = "reward=coin:coin rollout.group_size=2 rollout.redraw=3 train.learning_rate=1e-30"
        run_jobs(folder, num_ranks, {"run": common})
        numbers = [(line["redrawn_groups"], line["stayed_flat"]) for line in log_of(folder, "run")]
        rows = [row for step in (1, 2, 3) for row in read_samples(folder / "runs/run", step)]
        found.append((numbers, [(row["prompt"], row["token_ids"], row["reward"]) for row in rows]))
    assert found[0] == found[1] and sum(num for num, _ in found[0][0]) > 3
