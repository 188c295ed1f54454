from __future__ import annotations

import pytest
import torch

from lockstep.kernels.sampling.entropy import row_entropy


@pytest.mark.parametrize("banned", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_that_cannot_be_drawn_add_nothing_to_entropy_and_gradient(banned, temperature):
    """Chameleon's tokens of images have the least float32, which the temperature makes infinite: all was NaN."""
    logits = torch.tensor([[0.0, 1.0, banned, 2.0]], requires_grad=True)
    entropy = row_entropy(logits, temperature)
    expected = torch.distributions.Categorical(logits=torch.tensor([0.0, 1.0, 2.0]) / temperature).entropy()
    torch.testing.assert_close(entropy[0], expected)
    [gradient] = torch.autograd.grad(entropy.sum(), logits)
    kept = torch.tensor([[0.0, 1.0, 2.0]], requires_grad=True)
    [expected_gradient] = torch.autograd.grad(row_entropy(kept, temperature).sum(), kept)
    torch.testing.assert_close(gradient[:, [0, 1, 3]], expected_gradient)
    assert gradient[0, 2] == 0.0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_logits_have_no_entropy(broken):
    logits = torch.tensor([[0.0, broken, 2.0]], requires_grad=True)
    entropy = row_entropy(logits, 1.0)
    [gradient] = torch.autograd.grad(entropy.sum(), logits)
    assert entropy.isnan().all() and gradient.isnan().any()
