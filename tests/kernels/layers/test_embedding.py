"""Embeddings with a gradient in order: PyTorch's values, and on a GPU the same bits in every run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lockstep.kernels.layers.embedding import embedding

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(num_tokens: int, width: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(50, (num_tokens,), generator=generator).to(DEVICE)
    weight = torch.randn(50, width, generator=generator).to(DEVICE).requires_grad_()
    return ids, weight, torch.randn(num_tokens, width, generator=generator).to(DEVICE)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
def test_values_and_gradients_are_those_of_pytorch(options: dict[str, int]) -> None:
    ids, weight, grad = inputs(200)
    found, expected = embedding(ids.view(10, 20), weight, **options), F.embedding(ids.view(10, 20), weight, **options)
    assert torch.equal(found, expected)
    (of_found,), (of_expected,) = (torch.autograd.grad(out, weight, grad.view(10, 20, 24)) for out in (found, expected))
    torch.testing.assert_close(of_found, of_expected, atol=1e-5, rtol=1e-5)
    assert embedding(ids, weight.detach()).grad_fn is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="no GPU")
def test_gradients_of_many_tokens_have_the_same_bits_in_every_run() -> None:
    ids, weight, grad = inputs(20_000, 256)
    first, *others = (torch.autograd.grad(embedding(ids, weight), weight, grad)[0] for _ in range(6))
    assert all(torch.equal(other, first) for other in others)
