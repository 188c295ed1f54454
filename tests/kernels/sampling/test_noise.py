"""Tests of the noise of draws: against plain integers and exact logarithms, alike on every path, and independent."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lockstep.kernels.sampling import cpp as native_sampling
from lockstep.kernels.sampling.draws import derive_seed
from lockstep.kernels.sampling.noise import gumbel_noise, natural_log, noise_word, row_keys
from lockstep.kernels.sampling.reference import weights
from lockstep.tests.optional_packages import needs_triton

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
EXTREMES = [0, 1, -1, 1234567, 2**63 - 1, -(2**63)]


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(seed: int, count: int) -> list[int]:
    return [mix((seed + (i + 1) * GAMMA) & MASK) for i in range(count)]


def naive_key(seed: int, position: int) -> tuple[int, int, int, int]:
    first = splitmix64(mix((seed + GAMMA) & MASK), position + 1)[-1]
    second = mix((first + GAMMA) & MASK)
    return first & 0xFFFFFFFF, first >> 32, second & 0xFFFFFFFF, second >> 32


def naive_word(token_id: int, a: int, b: int) -> int:
    h = (token_id + a) % 2**32
    h = (h ^ h >> 17) * 0xED5AD4BB % 2**32
    h = ((h ^ h >> 11) + b) * 0xAC4C1B51 % 2**32
    h = (h ^ h >> 15) * 0x31848BAB % 2**32
    return h ^ h >> 14


def naive_noise(seed: int, position: int, token_id: int) -> float:
    a, b, c, d = naive_key(seed & MASK, position)
    k = (naive_word(token_id, a, b) << 20) + (naive_word(token_id, c, d) >> 12)
    return -math.log(-math.log1p(-(k + 0.5) * 2.0**-52))


def test_the_plain_integer_splitmix64_gives_the_published_vectors():
    """Compare with the reference C program's output for seed 1234567 (Vigna, prng.di.unimi.it; also Rosetta Code)."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix64(1234567, 5) == published


@pytest.mark.parametrize("seed", EXTREMES)
def test_noise_is_the_gumbel_number_of_its_definition(seed):
    positions, ids = [0, 1, 2, 17, 999], [0, 1, 5, 151_935, 2**31 - 1]
    noise = gumbel_noise(row_keys(torch.full((5,), seed), torch.tensor(positions)).unsqueeze(-1), torch.tensor(ids))
    assert noise.dtype == torch.float64
    for row, position in zip(noise.tolist(), positions, strict=True):
        assert row == pytest.approx([naive_noise(seed, position, id) for id in ids], rel=1e-14, abs=1e-14)


def test_the_logarithm_is_right_to_its_last_bits_from_the_smallest_number_to_the_largest():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            torch.rand(20_000, generator=generator, dtype=torch.float64),
            1.0 - torch.rand(20_000, generator=generator, dtype=torch.float64) * 2.0 ** -(torch.arange(20_000) % 53),
            torch.rand(20_000, generator=generator, dtype=torch.float64) * 40,
            torch.tensor([2.0**-53, 1.0 - 2.0**-53, 1.0, 36.7368005696771, 2.0**-1022]),
        ]
    )  # fmt: skip
    x = x[x > 0]
    exact = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    error = (natural_log(x) - exact).abs() / exact.abs().clamp(min=1e-300)
    assert error.max() < 2.0**-51


def test_weights_are_exponentials():
    z = -torch.rand(50_000, generator=torch.Generator().manual_seed(0)) * 87
    exact = z.double().exp()
    assert ((weights(z).double() - exact) / exact).abs().max() < 1e-6
    assert weights(torch.tensor([0.0, -0.0, -87.4, -1e30, -torch.inf])).tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("path", ["cpp", "triton"])
def test_noise_and_weights_have_the_same_bits_on_every_path(path):
    ids = torch.cat([torch.arange(3000), torch.tensor([151_935, 2**31 - 1])])
    seeds, positions = torch.tensor(EXTREMES), torch.tensor([0, 1, 2, 17, 2**31, 2**62])
    expected = gumbel_noise(row_keys(seeds, positions).unsqueeze(-1), ids)
    z = torch.cat([-torch.rand(40_000) * 90, torch.tensor([0.0, -87.3, -87.30001, -1e-40, -torch.inf])])
    if path == "cpp":
        rows = zip(seeds.tolist(), positions.tolist(), strict=True)
        assert torch.equal(torch.stack([native_sampling.gumbel_noise(*row, ids) for row in rows]), expected)
        assert torch.equal(native_sampling.weights(z), weights(z))
    else:
        needs_triton()
        from lockstep.kernels.sampling import triton_draws, triton_noise

        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = triton_noise.noise(*(each.to(device) for each in (seeds, positions, ids)))
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(triton_draws.weights(z.to(device)).cpu(), weights(z))


# -- independence -----------------------------------------------------------------------------------------------------


def uniforms(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Turn the noise of each (seed, position, id) into uniform numbers [N]."""
    return (-(-gumbel_noise(row_keys(seeds, positions), ids)).exp()).exp()


NUM = 150_000
ALONG = {
    "ids": ((0, 0, 1), (0, 0, 1)),  # the coordinate that counts, and the step to the neighbour
    "seeds": ((1, 0, 0), (1, 0, 0)),
    "positions": ((0, 1, 0), (0, 1, 0)),
    "ids, neighbouring seeds": ((0, 0, 1), (1, 0, 0)),
    "ids, neighbouring positions": ((0, 0, 1), (0, 1, 0)),
    "positions, neighbouring ids": ((0, 1, 0), (0, 0, 1)),
    "ids of one position and the next": ((0, 0, 1), (0, 1, -1)),
}


@pytest.mark.parametrize("along", ALONG)
def test_noise_is_uniform_and_neighbours_are_uncorrelated(along):
    stats = pytest.importorskip("scipy.stats")
    direction, step = ALONG[along]
    count = torch.arange(NUM)
    here = [count * d + (s == -1) for d, s in zip(direction, step, strict=True)]
    u, v = uniforms(*here), uniforms(*(c + s for c, s in zip(here, step, strict=True)))
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    assert abs(torch.corrcoef(torch.stack([u, v]))[0, 1].item()) < 4.5 / math.sqrt(NUM)
    cells = (u * 10).long() * 10 + (v * 10).long()
    if direction == step:  # pairs that overlap are not independent
        cells = cells[::2]
    assert stats.chisquare(torch.bincount(cells, minlength=100).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("flipped", ["seed", "position", "id"])
def test_one_flipped_bit_of_a_coordinate_leaves_nothing_of_the_noise(flipped):
    num, widths = 4000, {"seed": 64, "position": 63, "id": 31}
    generator = torch.Generator().manual_seed(1)
    columns = {name: torch.randint(0, 2**20, (num,), generator=generator) for name in widths}
    u = uniforms(*columns.values())
    for bit in range(widths[flipped]):
        other = columns | {flipped: columns[flipped] ^ (-(2**63) if bit == 63 else 1 << bit)}
        correlation = torch.corrcoef(torch.stack([u, uniforms(*other.values())]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(num), bit


def test_the_largest_noise_of_a_row_is_a_gumbel_number_too():
    """The maximum of V Gumbel numbers, less log V, is one again: this fails where a row's numbers hang together."""
    stats = pytest.importorskip("scipy.stats")
    rows, vocab_size = 20_000, 64
    keys = row_keys(torch.arange(rows), torch.zeros(rows).long()).unsqueeze(-1)
    largest = gumbel_noise(keys, torch.arange(vocab_size)).amax(-1)
    assert stats.kstest(largest.numpy() - math.log(vocab_size), "gumbel_r").pvalue > 1e-4


def inverse_word(h: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Find the token id with this word."""

    def unshift(h: Tensor, bits: int) -> Tensor:
        x = h
        for _ in range(32 // bits):
            x = h ^ (x >> bits)
        return x

    def times(h: Tensor, factor: int) -> Tensor:
        inverse = pow(factor, -1, 2**32)
        return (h * inverse) & 0xFFFFFFFF

    h = unshift(times(unshift(h, 14), 0x31848BAB), 15)
    h = unshift((times(h, 0xAC4C1B51) - b) & 0xFFFFFFFF, 11)
    return (unshift(times(h, 0xED5AD4BB), 17) - a) & 0xFFFFFFFF


def test_a_token_of_probability_1e_9_wins_as_often_as_it_should():
    """A rare token wins where its first word is one of the smallest. Each of 2^32 words has one id, so the ids of these
    words are found by inversion, and their share of all words is known."""
    rows, strata, probability = 3000, 90, 1e-9
    won = 0.0
    for word in range(strata):
        seeds, positions = torch.arange(rows) + 7919 * word, torch.arange(rows) % 50
        keys = row_keys(seeds, positions)
        ids = inverse_word(torch.full((rows,), word), keys[0].long(), keys[1].long())
        assert (noise_word(ids, *keys[:2]) == word).all()
        rare = gumbel_noise(keys, ids) + math.log(probability)
        common = gumbel_noise(keys, torch.tensor(11)) + math.log1p(-probability)
        won += (rare > common).double().mean().item() * 2.0**-32
    assert won / probability == pytest.approx(1.0, abs=0.02)


# -- seeds ------------------------------------------------------------------------------------------------------------


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
