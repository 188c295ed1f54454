"""The counter-based noise against SplitMix64 in plain integers, and inverse transform sampling."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from lockstep.kernels.logprobs import scaled_logprobs, selected_logprobs
from lockstep.kernels.sampling import derive_seed, sample_from, uniform_noise

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(seed: int, count: int) -> list[int]:
    return [mix((seed + (i + 1) * GAMMA) & MASK) for i in range(count)]


def naive_noise(seed: int, position: int) -> float:
    start = mix((seed + GAMMA) & MASK)
    return (splitmix64(start, position + 1)[-1] >> 12) * 2.0**-52


def test_the_plain_integer_splitmix64_gives_the_published_vectors():
    """Output of the reference C program for seed 1234567 (Vigna, prng.di.unimi.it; also Rosetta Code)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
                 16408922859458223821]
    assert splitmix64(1234567, 5) == published


@pytest.mark.parametrize("seed", [0, 1, -1, 1234567, 2**63 - 1, -(2**63)])
def test_noise_is_splitmix64_read_at_the_position(seed):
    positions = [0, 1, 2, 17, 999]
    noise = uniform_noise(torch.full((5,), seed), torch.tensor(positions))
    assert noise.dtype == torch.float64
    assert noise.tolist() == [naive_noise(seed & MASK, p) for p in positions]


def test_noise_of_a_row_does_not_depend_on_the_batch():
    seeds, positions = torch.arange(100), torch.arange(100) * 7
    whole = uniform_noise(seeds, positions)
    assert all(uniform_noise(seeds[i : i + 1], positions[i : i + 1]).item() == whole[i] for i in range(100))


@pytest.mark.parametrize("along", ["positions of one seed", "seeds at one position", "neighbouring differences"])
def test_noise_is_uniform_and_below_one(along):
    count = torch.arange(200_000)
    zeros = torch.zeros_like(count)
    if along == "positions of one seed":
        noise = uniform_noise(zeros, count)
    elif along == "seeds at one position":
        noise = uniform_noise(count, zeros)
    else:
        noise = (uniform_noise(count, zeros) - uniform_noise(count + 1, zeros)) % 1.0
    assert noise.min() >= 0.0 and noise.max() < 1.0
    assert stats.kstest(noise.numpy(), "uniform").pvalue > 1e-3
    pairs = torch.stack([noise[:-1:2], noise[1::2]])
    cells = (pairs[0] * 10).long() * 10 + (pairs[1] * 10).long()
    assert stats.chisquare(torch.bincount(cells, minlength=100).numpy()).pvalue > 1e-3


def naive_derived(*parts: int) -> int:
    state = 0
    for part in parts:
        state = mix((state + (part & MASK) + GAMMA) & MASK)
    return state - 2**64 if state >= 2**63 else state


@pytest.mark.parametrize(
    "parts", [(0,), (0, 0), (1, 2), (2, 1), (-1, 5), (2**63 - 1, 3), (-(2**63), 0), (2**64 + 1, 2)]
)
def test_derived_seed_is_the_mixed_chain_of_its_parts(parts):
    assert derive_seed(*parts) == naive_derived(*parts)


def test_derived_seeds_of_different_parts_differ():
    seeds = [derive_seed(a, b) for a, b in itertools.product(range(60), range(60))]
    assert len(set(seeds)) == 3600


def test_sampling_takes_the_token_where_the_running_sum_passes_the_noise():
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]])
    for noise, expected in [(0.0, 0), (0.2499, 0), (0.25, 2), (0.5, 2), (0.7499, 2), (0.75, 3), (0.999, 3)]:
        assert sample_from(probabilities, torch.tensor([noise], dtype=torch.float64)).item() == expected


def test_tokens_without_probability_are_never_chosen_not_even_at_the_ends():
    probabilities = torch.tensor([[0.0, 0.3, 0.1, 0.0, 0.0]]).repeat(3, 1)
    largest = 1.0 - 2.0**-52
    chosen = sample_from(probabilities, torch.tensor([0.0, 0.5, largest], dtype=torch.float64))
    assert chosen.tolist() == [1, 1, 2]


def test_largest_noise_stays_inside_the_vocabulary_for_any_total():
    torch.manual_seed(0)
    probabilities = torch.rand(2000, 50) * torch.logspace(-30, 30, 2000).unsqueeze(-1)
    largest = torch.full((2000,), 1.0 - 2.0**-52, dtype=torch.float64)
    assert sample_from(probabilities, largest).max() < 50


def test_scaled_logprobs_divide_before_the_softmax_over_the_whole_vocabulary():
    torch.manual_seed(0)
    logits, temperatures = torch.randn(6, 40), torch.tensor([0.3, 1.0, 2.0, 0.7, 1.5, 1e-3])
    expected = torch.log_softmax(logits.double() / temperatures.double().unsqueeze(-1), -1)
    torch.testing.assert_close(scaled_logprobs(logits, temperatures).double(), expected, atol=1e-5, rtol=1e-5)
    for row, temperature in enumerate(temperatures.tolist()):
        alone = scaled_logprobs(logits[row : row + 1], temperature)
        assert torch.equal(alone, scaled_logprobs(logits, temperatures)[row : row + 1])


def test_selected_logprobs_pick_and_pass_gradients():
    logits = torch.randn(3, 20, dtype=torch.bfloat16).requires_grad_()
    ids = torch.tensor([3, 0, 19])
    picked = selected_logprobs(logits, ids, 0.7)
    assert picked.dtype == torch.float32
    assert torch.equal(picked, scaled_logprobs(logits, 0.7)[torch.arange(3), ids])
    picked.sum().backward()
    assert logits.grad.abs().sum() > 0
