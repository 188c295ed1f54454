"""The views of a run's metrics: TensorBoard's events, and the held-out reward as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.integration.grpo.results.run_log import RunLog, plot_rewards

LINE = {"reward_mean": 0.5, "logprob_gap": 0.0, "rollout_tokens_per_s": 1.0, "rollout_s": 1.0, "train_s": 1.0,
        "sync_s": 1.0, "weight_version": "1", "weight_digest": "d"}  # fmt: skip


def run(folder: Path, first: int, end: int, reward: float) -> None:
    """Log the steps after `first` up to `end`."""
    log = RunLog(folder, 4, first, tensorboard=True)
    for step in range(first + 1, end + 1):
        log.step({"step": step, **LINE, "reward_mean": reward})
    log.close(draws=False)


def test_a_resumed_run_keeps_the_events_of_every_step_that_is_done(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, 0, 3, 0.25)  # killed after step 3, with a checkpoint of step 2
    run(tmp_path, 2, 4, 0.75)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert shown == [(1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75)]


def test_the_heldout_reward_is_a_dash_where_the_metrics_have_no_evaluation(tmp_path):
    log = RunLog(tmp_path, 4, 4, tensorboard=False)  # of a run that had ended, whose metrics were lost
    assert log.heldout() == "-"
    log.step({"step": 5, **LINE, "eval_reward_mean": 0.4321})
    assert log.heldout() == "43.2%"
    log.close(draws=False)


@pytest.mark.parametrize(
    ("before", "sampled", "after", "line"),
    [
        (0.346, 0.5, 0.982, "held-out mean reward: 34.6% before, 98.2% after 4 steps"),
        (0.0, 0.0, 1.0, "held-out mean reward: 0.0% before, 100.0% after 4 steps"),
        (0.5, 0.5, 1.625, "held-out mean reward: 0.500 before, 1.625 after 4 steps"),
        (-0.25, 0.5, 0.75, "held-out mean reward: -0.250 before, 0.750 after 4 steps"),
        (0.25, 12.5, 0.75, "held-out mean reward: 0.250 before, 0.750 after 4 steps"),
    ],
)
def test_rewards_are_percentages_where_all_are_shares(tmp_path, before, sampled, after, line):
    log = RunLog(tmp_path, 4, 0, tensorboard=False)
    log.step({"step": 1, **LINE, "reward_mean": sampled})
    log.step({"step": 2, **LINE, "eval_reward_mean": after})
    assert log.result({"eval_reward_mean": before}) == line
    log.close(draws=False)


@pytest.mark.parametrize(("rewards", "limits"), [((0.0, 1.0), (0.0, 1.0)), ((0.5, 1.625), None), ((-3.0, 0.5), None)])
def test_the_plot_shows_all_rewards(rewards, limits):
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    lines = [{"step": at, **LINE, "reward_mean": one, "eval_reward_mean": one} for at, one in enumerate(rewards)]
    plot_rewards(lines, axes)
    low, high = axes.get_ylim()
    assert (low, high) == limits if limits else low <= min(rewards) and high >= max(rewards)
    pyplot.close(figure)


def test_further_evaluations_stand_beside_the_held_out_one_and_a_few_of_them_in_the_bar(tmp_path):
    log = RunLog(tmp_path, 2, 0, tensorboard=False)
    log.step({"step": 1, **LINE, "eval_reward_mean": 0.25, "eval_reward_mean/a": 0.5, "eval_success/a": 0.5})
    names = ("a", "b", "c", "d")
    line = {"step": 2, **LINE, **{f"eval_reward_mean/{name}": 0.75 for name in names}}
    assert "held-out 25.0% (a 50.0%) |" in log._summary()
    log.step(line)
    assert "held-out 25.0% (a 75.0%, b 75.0%, c 75.0%, 1 more) |" in log._summary()
    before = {"eval_reward_mean": 0.0, "eval_reward_mean/a": 0.125}
    assert log.result(before) == (
        "held-out mean reward: 0.0% before, 25.0% after 2 steps; a: 12.5% before, 75.0% after; b: 75.0% after; "
        "c: 75.0% after; d: 75.0% after"
    )
    log.close(draws=False)


def test_the_plot_has_a_line_of_each_evaluation():
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = pyplot.figure().subplots()
    lines = [{"step": step, "reward_mean": 0.5, "eval_reward_mean/a": 0.25 * step} for step in (1, 2)]
    plot_rewards([*lines, {"step": 3, "reward_mean": 0.5, "eval_reward_mean": 0.5}], axes)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn == {"reward, sampled": [0.5, 0.5, 0.5], "held-out": [0.5], "a": [0.25, 0.5]}
    assert axes.get_ylim() == (0, 1)
    pyplot.close("all")
