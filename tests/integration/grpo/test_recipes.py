"""The job with other advantages, several optimizer steps on a step's samples, and a teacher."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from lockstep.integration.grpo.results.samples import read_samples
from lockstep.integration.grpo.settings.config import load_config
from lockstep.tests.support.job_launcher import CONFIG, log_of, run_jobs

RECIPES = {
    "steps": "train.minibatches_per_step=2 train.epochs_per_step=2 train.learning_rate=1e-3",
    "sharded": "train.minibatches_per_step=2 trainer=fsdp2 train.microbatch_tokens=64",
    "zero": "train.minibatches_per_step=2 trainer=deepspeed deepspeed.zero_stage=3",
    "batch": "train.baseline=batch train.scale_rewards=batch train.entropy_coefficient=0.01",
    "others": "train.baseline=leave_one_out train.scale_rewards=none train.loss=gspo",
    "single": "train.baseline=batch train.scale_rewards=batch rollout.group_size=1 run.rollouts_every=0",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Run the job with each recipe on two ranks, and with one of them as the teacher of another. Returns the folder."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("recipes")
    teacher = f"train.reference={folder}/runs/batch/model train.kl_coefficient=1.0 train.kl_in=advantage"
    run_jobs(folder, 2, RECIPES | {"taught": f"{teacher} reward=no_reward train.minibatches_per_step=2"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, "taught"])
def test_a_recipe_trains_with_a_gap_of_zero(runs, name):
    lines = log_of(runs, name)
    assert all(line["logprob_gap"] == 0.0 and math.isfinite(line["loss"]) for line in lines)
    assert len({line["weight_digest"] for line in lines}) == 3, "every step changes the weights"


@pytest.mark.slow
def test_advantages_are_of_the_whole_step_over_all_ranks(runs):
    rows = read_samples(runs / "runs" / "batch", 2)
    rewards = [row["reward"] for row in rows]
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert len(rows) == 16 and deviation > 0
    assert [row["advantage"] for row in rows] == pytest.approx([(one - mean) / deviation for one in rewards], abs=1e-4)


@pytest.mark.slow
def test_a_teacher_alone_has_a_kl_that_is_told(runs):
    lines = log_of(runs, "taught")
    assert all(line["kl"] > 0.0 and line["reward_mean"] == 0.0 for line in lines)
    assert all(line["samples_without_backward"] == 0 for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.reference=/nowhere"], "train.reference: '/nowhere' is no model folder"),
        (
            ["run.name=mine", "train.reference=runs/mine/model"],
            "train.reference: 'runs/mine/model' is in the folder of",
        ),
        (["train.minibatches_per_step=32"], "train.minibatches_per_step=32 does not divide the 16 prompts that each"),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_it_starts(settings, message):
    pytest.importorskip("matplotlib")
    from lockstep.integration.grpo.planning.checks import check_job

    with pytest.raises(ValueError, match=message):
        check_job(load_config(CONFIG, ["train.kl_coefficient=0.1", *settings]), num_ranks=2)


@pytest.mark.parametrize("differs", ["", "tokens", "logits"])
def test_a_teacher_with_other_tokens_or_fewer_logits_is_refused_by_name(tmp_path, make_model, differs):
    pytest.importorskip("matplotlib")
    from lockstep.integration.grpo.planning.checks import check_job
    from lockstep.integration.grpo.planning.description import describe_plan
    from lockstep.integration.grpo.tasks.arithmetic import VOCAB_SIZE, build_tokenizer

    num_logits = VOCAB_SIZE - (differs == "logits")
    make_model("qwen3", vocab_size=num_logits).save_pretrained(tmp_path)
    tokenizer = build_tokenizer()
    if differs == "tokens":
        tokenizer.add_tokens(["<teacher>"])
    tokenizer.save_pretrained(tmp_path)
    config = load_config(CONFIG, ["train.kl_coefficient=0.1", f"train.reference={tmp_path}"])
    if differs:
        said = {"tokens": "other tokens than the job's model, 1 of them: '<teacher>'",
                "logits": f"logits of {num_logits} tokens only, the job's model of {VOCAB_SIZE}"}  # fmt: skip
        with pytest.raises(ValueError, match=f"{tmp_path} has {said[differs]}"):
            check_job(config, num_ranks=2)
        return
    check_job(config, num_ranks=2)
    assert "the KL reference 0." in (plan := describe_plan(config, 2))
    assert "1 optimizer step(s) on each" in plan
    several = load_config(CONFIG, ["train.minibatches_per_step=4", "train.epochs_per_step=2"])
    assert "8 optimizer step(s) on each" in describe_plan(several, 2)
