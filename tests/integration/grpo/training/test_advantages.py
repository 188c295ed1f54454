import math

import pytest
import torch

from lockstep.integration.grpo.training.advantages import StepRewards, group_advantages

REWARDS = torch.tensor([[3.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
STEP = [3.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
DEVIATION = torch.tensor(STEP).std(correction=0).item()


def test_advantages_are_rewards_normalised_within_their_group():
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 0.0]]), epsilon=0.0)
    root3 = math.sqrt(3.0)
    expected = torch.tensor([[1.0, -1.0, -1.0, 1.0], [root3, -1 / root3, -1 / root3, -1 / root3]])
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("group", "none", [[2.0, -1.0, -1.0, 0.0], [0.0] * 4]),
        # 3 less the mean of 0, 0 and 1, and so on.
        ("leave_one_out", "none", [[3 - 1 / 3, -4 / 3, -4 / 3, 0.0], [0.0] * 4]),
        ("batch", "none", [[2.0, -1.0, -1.0, 0.0], [0.0] * 4]),
        ("none", "none", REWARDS.tolist()),
        ("group", "batch", [[2 / DEVIATION, -1 / DEVIATION, -1 / DEVIATION, 0.0], [0.0] * 4]),
        ("batch", "batch", [[2 / DEVIATION, -1 / DEVIATION, -1 / DEVIATION, 0.0], [0.0] * 4]),
    ],
)
def test_rewards_are_compared_as_the_settings_say(baseline, scale, expected):
    advantages = group_advantages(REWARDS, baseline, scale, StepRewards.of(STEP), epsilon=0.0)
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_a_group_that_succeeds_together_stands_out_in_the_step():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert group_advantages(rewards, "batch", "none", StepRewards.of([1.0, 1.0, 0.0, 0.0])).tolist() == [
        [0.5, 0.5],
        [-0.5, -0.5],
    ]


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_of_equal_rewards_have_advantages_of_exactly_zero(baseline, scale):
    if (baseline, scale) == ("batch", "group"):
        return  # refused by the settings
    for value in (0.1, 1e-30, 0.7):  # the float mean of three times 0.1 is not 0.1
        rewards = torch.full((3, 3), value)
        found = group_advantages(rewards, baseline, scale, StepRewards.of(rewards.flatten().tolist()), epsilon=0.0)
        assert found.tolist() == [[0.0] * 3] * 3


def test_a_group_of_one_sample_has_no_advantage_over_itself():
    assert group_advantages(torch.tensor([[0.3]])).tolist() == [[0.0]]
    assert group_advantages(torch.tensor([[0.3]]), "none", "none").tolist() == torch.tensor([[0.3]]).tolist()


@pytest.mark.parametrize("rewards", [torch.ones(4), torch.ones(2, 0), torch.ones(2, 2, dtype=torch.int64)])
def test_rewards_of_another_form_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards must be"):
        group_advantages(rewards)


def test_rewards_that_are_missing_are_named():
    with pytest.raises(ValueError, match="need the rewards of the step"):
        group_advantages(REWARDS, "group", "batch")
    with pytest.raises(ValueError, match="at least 2 samples, not 1"):
        group_advantages(torch.tensor([[0.3]]), "leave_one_out", "none")
