"""Tests of draws and log-probabilities on a CPU under another default device of the caller's, as trainers set a GPU."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.sampling.draws import KEEP_ALL, RowSettings, draw_tokens
from lockstep.kernels.sampling.logprobs import scaled_logprobs, selected_logprobs
from lockstep.kernels.sampling.reference import weights

DEFAULT = torch.device("meta")  # stands for a GPU: what is made there by mistake cannot be read


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(5, 700, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_log_probabilities_and_their_gradients_have_the_same_bits(logits, dtype) -> None:
    token_ids = torch.arange(5)

    def both() -> tuple[torch.Tensor, ...]:
        x = logits.to(dtype).requires_grad_()
        found = selected_logprobs(x, token_ids, 0.7), scaled_logprobs(x, 0.7)
        (found[0].sum() + found[1][:, 3].sum()).backward()
        return *(each.detach() for each in found), x.grad

    expected = both()
    with DEFAULT:
        assert all(map(torch.equal, both(), expected))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(KEEP_ALL, 1.0, 0.0), (20, 0.8, 0.01)])
def test_draws_are_the_same(logits, top_k, top_p, min_p) -> None:
    numbers = {"dtype": torch.int64, "device": "cpu"}
    settings = RowSettings(
        torch.full((5,), 0.9), torch.arange(5), torch.full((5,), top_k, **numbers),
        torch.full((5,), top_p, dtype=torch.float64), torch.full((5,), min_p),
    )  # fmt: skip
    allowed = torch.tensor([1]), torch.full((1, 88), 0xF0, dtype=torch.uint8)
    reshaped = torch.tensor([2]), logits[2:3] + 1
    expected = draw_tokens(logits, settings, torch.arange(5), reshaped, allowed), weights(logits[0])
    positions = torch.arange(5)
    with DEFAULT:
        found = draw_tokens(logits, settings, positions, reshaped, allowed), weights(logits[0])
    assert vars(found[0]).keys() == vars(expected[0]).keys()
    for name, tensor in vars(expected[0]).items():
        assert torch.equal(getattr(found[0], name), tensor), name
    assert torch.equal(found[1], expected[1])
