import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.integration.grpo.training.loss import (
    RatioNumbers,
    importance_weights,
    kl_k3,
    policy_loss,
    ratio_numbers,
)


def ones_mask(tensor):
    return torch.ones_like(tensor, dtype=torch.bool)


def test_loss_and_gradient_on_policy_are_those_of_reinforce():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    result = policy_loss(logprobs, logprobs.detach().clone(), advantages, ones_mask(logprobs), num_tokens=3)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.0 - 0.5 + 2.0) / 3)
    torch.testing.assert_close(logprobs.grad, -advantages / 3)
    assert (result.clip_fraction, result.kl) == (0.0, 0.0)


class Waits(TorchDispatchMode):
    """Counts the numbers that are read from tensors: each makes the host wait for the device."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_loss_waits_for_the_device_only_for_its_two_numbers():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    behaviour = logprobs.detach() - 0.1
    for reference, num in ((None, 1), (behaviour, 2)):
        with Waits() as waits:
            policy_loss(
                logprobs, behaviour, torch.ones(2), ones_mask(logprobs), num_tokens=2, reference_logprobs=reference
            )
        assert waits.num == num


def test_the_clip_cuts_the_gradient_only_where_the_ratio_went_the_advantages_way():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    logprobs = ratios.log().requires_grad_()
    result = policy_loss(
        logprobs, torch.zeros(5), advantages, ones_mask(ratios), num_tokens=5, clip_low=0.2, clip_high=0.3
    )
    result.loss.backward()
    # min(1.5, 1.3), min(-1.5, -1.3), min(0.5, 0.8), min(-0.5, -0.8), 2 * 1.1
    assert result.loss.item() == pytest.approx(-(1.3 - 1.5 + 0.5 - 0.8 + 2.2) / 5)
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 1.5, -0.5, 0.0, -2.2]) / 5)
    assert result.clip_fraction == pytest.approx(2 / 5)


def test_the_ratios_of_tokens_that_others_drew_are_told_in_numbers():
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    logprobs = behaviour + torch.tensor([3.0, 0.5, 1.5, 2.0, 8.0]).log()
    older = torch.tensor([True, True, False, True, False])
    found = ratio_numbers(logprobs, behaviour, older, (2, 2, 1), 1.9)
    assert found == pytest.approx(RatioNumbers(3, 5.5, 2, 0, 3.0))
    found = ratio_numbers(logprobs, behaviour, older, (2, 2, 1), 1.9, 1.6)
    assert found.num_dropped == 1, "of the second sequence; the product of the first is 1.5"
    weights = importance_weights(logprobs, behaviour, older, (2, 2, 1), 1.9, 1.6)
    torch.testing.assert_close(weights, torch.tensor([1.9, 0.5, 0.0, 0.0, 1.0]))
    assert ratio_numbers(logprobs, behaviour, ~older & older, (2, 2, 1), 1.9) == RatioNumbers()


def test_the_kl_of_tokens_that_others_drew_counts_with_their_weights():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference, weights = torch.tensor([-0.5, -1.0, -float("inf")]), torch.tensor([2.0, 0.5, 0.0])
    result = policy_loss(
        logprobs, logprobs.detach(), torch.zeros(3), ones_mask(logprobs), 3, reference_logprobs=reference,
        kl_coefficient=0.1, kl_weights=weights,
    )  # fmt: skip
    estimates = [math.expm1(0.5) - 0.5, math.expm1(1.0) - 1.0]
    assert result.kl == pytest.approx((2 * estimates[0] + 0.5 * estimates[1]) / 3)
    result.loss.backward()
    # of exp(r - l) - (r - l) - 1: -exp(r - l) + 1
    expected = [0.1 * 2 * (1 - math.exp(0.5)) / 3, 0.1 * 0.5 * (1 - math.exp(1.0)) / 3, 0.0]
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected))


def test_kl_adds_its_estimate_and_its_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0 + math.log(2.0), -2.0])
    result = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.zeros(2),
        ones_mask(logprobs),
        num_tokens=2,
        reference_logprobs=reference,
        kl_coefficient=0.1,
    )
    result.loss.backward()
    kl = (2.0 - math.log(2.0) - 1.0) / 2
    assert result.kl == pytest.approx(kl)
    assert result.loss.item() == pytest.approx(0.1 * kl)
    # d/dx (exp(r - x) - (r - x) - 1) = 1 - exp(r - x)
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.1 * (1 - 2.0) / 2, 0.0]))


def test_the_mean_of_k3_over_the_policy_is_the_kl_divergence():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    estimate = (policy * kl_k3(reference.log() - policy.log())).sum()
    torch.testing.assert_close(estimate, (policy * (policy / reference).log()).sum())
    assert (kl_k3(torch.linspace(-3, 3, 13)) >= 0).all()


def test_values_under_a_false_mask_change_neither_loss_nor_gradient():
    mask = torch.tensor([[True, True], [True, False]])
    junk = torch.tensor([[0.0, 0.0], [0.0, float("inf")]])
    logprobs = torch.full((2, 2), -1.0, requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0], [-2.0, 5.0]])
    result = policy_loss(
        logprobs, -1.0 - junk, advantages + junk, mask, 3, reference_logprobs=-1.0 + junk, kl_coefficient=0.5
    )
    result.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -1.0], [2.0, 0.0]]) / 3)
    assert (result.loss.item(), result.kl) == (0.0, 0.0)


def test_shares_of_ranks_and_micro_batches_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    logprobs, behaviour, advantages, reference = (torch.randn(6, 4, generator=generator) for _ in range(4))
    mask = torch.rand(6, 4, generator=generator) < 0.7
    num_tokens = int(mask.sum())

    def share(rows):
        return policy_loss(
            logprobs[rows],
            behaviour[rows],
            advantages[rows],
            mask[rows],
            num_tokens,
            0.2,
            0.2,
            reference[rows],
            0.1,
        )

    whole, parts = share(slice(None)), [share(slice(0, 1)), share(slice(1, 6))]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    assert sum(part.clip_fraction for part in parts) == pytest.approx(whole.clip_fraction)
    assert whole.clip_fraction > 0
    assert sum(part.kl for part in parts) == pytest.approx(whole.kl)


def test_every_fault_of_a_call_is_named():
    values = torch.zeros(3)
    with pytest.raises(ValueError) as error:
        policy_loss(values, torch.zeros(2), values, torch.zeros(3), num_tokens=0, kl_coefficient=0.1)
    for part in (
        "behaviour_logprobs has shape (2,)",
        "mask must be bool",
        "num_tokens must be",
        "reference_logprobs",
    ):
        assert part in str(error.value)


def test_importance_weights_are_cut_at_the_bound_and_1_for_the_current_weights_tokens():
    now = torch.tensor([-1.0, -0.5, -2.0, -0.1, -3.0], requires_grad=True)
    then = torch.tensor([-1.5, -3.0, -1.0, -0.4, -3.2])
    is_older = torch.tensor([True, True, True, False, False])
    weights = importance_weights(now, then, is_older, [3, 2], bound=2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-1.0), 1.0, 1.0])
    assert not weights.requires_grad
    assert weights[3:].tolist() == [1.0, 1.0]  # to the bit: the current weights' loss is the same as without


@pytest.mark.parametrize(("bound", "counts"), [(0.0, True), (math.exp(2.1), True), (math.exp(1.9), False)])
def test_a_sequence_beyond_its_bound_counts_nothing(bound, counts):
    now, then = torch.tensor([-1.0, -0.5, -2.0, -0.1]), torch.tensor([-1.5, -2.0, -2.0, -9.0])
    for sign in (1, -1):  # above the bound, or below its inverse
        is_older = torch.tensor([True, True, True, False])
        weights = importance_weights(sign * now, sign * then, is_older, [3, 1], bound=100.0, sequence_bound=bound)
        assert (weights[:3] > 0).all() == counts
        assert weights[3] == 1.0
