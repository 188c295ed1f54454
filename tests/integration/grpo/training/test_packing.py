"""Packed samples: every sampled token is predicted from the row before it."""

from __future__ import annotations

from dataclasses import replace

import torch

from lockstep.integration.grpo.training.loss import importance_weights, policy_loss
from lockstep.integration.grpo.training.packing import Sample, pack

A = Sample((1, 2, 3), (4, 5), (-0.1, -0.2), 1.0)
B = Sample((6,), (7, 8, 9), (-0.3, -0.4, -0.5), -2.0)


def test_rows_positions_and_targets_of_two_samples():
    batch = pack([A, B], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.packing["cu_seq_lens_q"].tolist() == [0, 4, 7]
    assert batch.logit_rows.tolist() == [2, 3, 4, 5, 6]
    assert batch.targets.tolist() == [4, 5, 7, 8, 9]
    assert batch.advantages.tolist() == [1.0, 1.0, -2.0, -2.0, -2.0]
    assert torch.equal(batch.logprobs, torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5]))


def test_forced_tokens_are_compared_and_do_not_count():
    """The loss of hand: (ratio 1) -A of each token that counts, over their number; a forced token has no gradient."""
    a, b = replace(A, forced=(False, True)), replace(B, forced=(True, False, False))
    batch = pack([a, b, replace(A, counts=False, forced=(False, True))], torch.device("cpu"))
    assert batch.mask.tolist() == [True, False, False, True, True, False, False]
    assert batch.targets.tolist() == [4, 5, 7, 8, 9, 4, 5] and batch.num_tokens == 7  # the gap is of all of them
    logprobs = batch.logprobs.clone().requires_grad_()
    found = policy_loss(logprobs, batch.logprobs, batch.advantages, batch.mask, 3, 0.2, 0.2)
    assert found.loss.item() == -(1.0 - 2.0 - 2.0) / 3
    found.loss.backward()
    third = torch.tensor(1.0) / 3
    assert torch.equal(logprobs.grad, torch.tensor([-third, 0, 0, 2 * third, 2 * third, 0, 0]))


def test_forced_tokens_of_older_weights_have_no_part_in_the_ratio_of_their_sample():
    a, b = replace(A, num_older=2, forced=(False, True)), replace(B, num_older=1, forced=(False, False, False))
    batch = pack([a, b], torch.device("cpu"))
    assert batch.has_ratio.tolist() == [True, False, True, False, False]
    now = batch.logprobs + torch.tensor([0.1, 5.0, 0.2, 0.0, 0.0])  # the forced one alone would be beyond the bound
    weights = importance_weights(now, batch.logprobs, batch.has_ratio, batch.lengths, 2.0, 1.5)
    assert torch.allclose(weights, torch.tensor([0.1, 0.0, 0.2, 0.0, 0.0]).exp())


def test_samples_without_a_grammar_count_all():
    assert pack([A, B], torch.device("cpu")).mask.tolist() == [True] * 5


def test_forced_tokens_of_an_episode_are_counted_among_its_sampled_ones():
    sample = replace(B, logprobs=(-0.3, -0.5), sampled=(True, False, True), forced=(True, False))
    batch = pack([sample], torch.device("cpu"))
    assert (batch.targets.tolist(), batch.mask.tolist()) == ([7, 9], [False, True])
