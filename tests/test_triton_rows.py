"""Triton's log-probabilities, draws and RMS norm, interpreted where there is no GPU: right values, gradients, and equal
bits for a row whatever its neighbours."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lockstep.kernels import sampling, triton_logprobs, triton_rms_norm, triton_sampling
from lockstep.kernels.rms_norm import NormRule, reference_rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = [NormRule(1e-6), NormRule(1e-5, 1.0, False), NormRule(1e-5, 1.0, True)]
EVERY = 2**62


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE, dtype)


def temperatures(rows: int) -> torch.Tensor:
    return torch.linspace(0.4, 1.8, rows, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [24, 5000])
def test_logprobs_and_their_gradient_are_those_of_the_reference(dtype: torch.dtype, vocab_size: int) -> None:
    logits, heat = noise(4, vocab_size, dtype=dtype), temperatures(4)
    ids, grad = torch.tensor([0, 3, vocab_size - 1, 7], device=DEVICE), noise(4, seed=1)
    out, stats = triton_logprobs.selected(logits, ids, heat)
    wide = logits.double().requires_grad_()
    expected = torch.log_softmax(wide / heat.double().unsqueeze(-1), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=5e-6)
    assert torch.equal(triton_logprobs.scaled(logits, heat).gather(-1, ids.unsqueeze(-1)).squeeze(-1), out)
    expected.backward(grad.double())
    mine = triton_logprobs.selected_gradient(logits, ids, heat, stats, grad)
    assert mine.dtype == dtype
    close = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(mine.double(), wide.grad, rtol=close, atol=close)


def test_logprobs_of_a_row_have_the_same_bits_in_every_batch() -> None:
    logits, heat, ids = noise(7, 4999, dtype=torch.bfloat16), temperatures(7), torch.arange(7, device=DEVICE) * 700
    whole = triton_logprobs.selected(logits, ids, heat)[0]
    for rows in (slice(0, 1), slice(3, 4), slice(2, 7)):
        assert torch.equal(triton_logprobs.selected(logits[rows], ids[rows], heat[rows])[0], whole[rows])


def test_broken_rows_and_tokens_beyond_the_vocabulary_are_nan_and_banned_tokens_are_not() -> None:
    logits = noise(4, 30)
    logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 4:] = -torch.inf
    one = torch.ones(1, device=DEVICE)
    assert triton_logprobs.selected(logits[:3], torch.tensor([5, 5, 5], device=DEVICE), one)[0].isnan().all()
    assert triton_logprobs.selected(logits[3:], torch.tensor([30], device=DEVICE), one)[0].isnan().all()
    torch.testing.assert_close(triton_logprobs.scaled(logits[3:], one), torch.log_softmax(logits[3:], -1))


def test_noise_is_that_of_the_reference_bit_for_bit() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 1234567], device=DEVICE)
    positions = torch.tensor([0, 1, 2, 17, 999, 2**31], device=DEVICE)
    assert torch.equal(triton_sampling.uniform_noise(seeds, positions), sampling.uniform_noise(seeds, positions))


def draw(logits: torch.Tensor, rows: slice, top_k: list[int], top_p: list[float], min_p: list[float]):
    count, limits = len(logits), [torch.tensor(top_k), torch.tensor(top_p).double(), torch.tensor(min_p)]
    keys = (torch.arange(count, device=DEVICE)[rows], torch.arange(count, device=DEVICE)[rows] * 5)
    filters = tuple(limit.to(DEVICE)[rows] for limit in limits)
    return triton_sampling.draw(logits[rows], temperatures(count)[rows], keys, filters, None, None), keys, filters


SETTINGS = [(EVERY, 1.0, 0.0), (5, 1.0, 0.0), (EVERY, 0.7, 0.0), (EVERY, 1.0, 0.1), (9, 0.8, 0.05), (1, 1.0, 0.0)]


def check_draws(vocab_size: int, rounds: int) -> None:
    logits = noise(len(SETTINGS) * rounds, vocab_size)
    logits[:, 5] = logits[:, 7]  # equal ones, of which a filter may keep the first
    (ids, logprobs, chances), keys, filters = draw(logits, slice(None), *zip(*SETTINGS * rounds, strict=True))
    expected = sampling.scaled_logprobs(logits, temperatures(len(logits)))
    probabilities = expected.exp()
    kept = sampling._filtered(probabilities, *filters)
    reference = sampling.sample_from(kept, sampling.uniform_noise(*keys))
    reference = torch.where(filters[0] == 1, expected.argmax(-1), reference)
    assert ids.tolist() == reference.tolist()
    torch.testing.assert_close(logprobs, expected.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(chances, probabilities.gather(-1, ids.unsqueeze(-1)).squeeze(-1))


def test_draws_with_every_filter_are_those_of_the_reference() -> None:
    check_draws(40, 1)


@pytest.mark.slow
def test_draws_from_several_tiles_are_those_of_the_reference() -> None:
    check_draws(5000, 5)


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    logits, settings = noise(4, 4100), ([EVERY, 1, EVERY, 4], [1.0, 1.0, 1.0, 0.9], [0.0, 0.0, 0.2, 0.0])
    whole, _, _ = draw(logits, slice(None), *settings)
    for rows in (slice(0, 1), slice(2, 4)):
        alone, _, _ = draw(logits, rows, *settings)
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_those_of_the_reference_and_rows_keep_their_bits(dtype: torch.dtype, rule: NormRule) -> None:
    x, weight = noise(3, 5, 100, dtype=dtype), noise(100, dtype=dtype, seed=1)
    arguments = (weight, rule.eps, rule.weight_offset, rule.round_first)
    out = triton_rms_norm.forward(x, *arguments)
    tolerance = {} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(out, reference_rms_norm(x, weight, rule), **tolerance)
    assert torch.equal(triton_rms_norm.forward(x[1:2, 2:], *arguments), out[1:2, 2:])


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_norms_are_the_references_in_double(rule: NormRule) -> None:
    x, weight, grad = (noise(*shape, dtype=torch.float64, seed=2) for shape in ((70, 24), (24,), (70, 24)))
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    normed = leaves[0] * torch.rsqrt(leaves[0].pow(2).mean(-1, keepdim=True) + rule.eps)
    (normed * (leaves[1] + rule.weight_offset)).backward(grad)
    mine = triton_rms_norm.backward(x, weight, rule.eps, rule.weight_offset, grad)
    for gradient, leaf in zip(mine, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-7)
