"""Tests of log-probabilities, draws, and the counter-based noise (against SplitMix64 in plain integers)."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats
from torch import Tensor

from lockstep.kernels.sampling.draws import (
    KEEP_ALL,
    RowSettings,
    derive_seed,
    draw_tokens,
    sample_from,
    uniform_noise,
)
from lockstep.kernels.sampling.logprobs import scaled_logprobs, selected_logprobs

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
    """Compare with the reference C program's output for seed 1234567 (Vigna, prng.di.unimi.it; also Rosetta Code)."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
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


# -- log-probabilities and draws: each of the two paths against plain arithmetic, and against itself ------------------

# The logits' dtype chooses the path: C++ for float32 and bfloat16, PyTorch for float64.
PATHS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
SIZES = [1, 2, 15, 17, 255, 1025, 16385]


def some_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(torch.bfloat16).to(dtype)


def settings_of(num_rows: int, **settings: object) -> RowSettings:
    """Build settings from one value for all rows, or one value each."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(settings.get(name, default), dtype=dtype).expand(num_rows).contiguous()

    return RowSettings(
        temperatures=column("temperature", 1.0, torch.float32),
        seeds=column("seed", 5, torch.int64),
        top_k=column("top_k", KEEP_ALL, torch.int64),
        top_p=column("top_p", 1.0, torch.float64),
        min_p=column("min_p", 0.0, torch.float32),
        filtered=torch.arange(num_rows if set(settings) & {"top_k", "top_p", "min_p"} else 0),
    )


def taken(settings: RowSettings, rows: slice) -> RowSettings:
    """Select the settings of these rows."""
    columns = [c[rows] for c in (settings.temperatures, settings.seeds, settings.top_k, settings.top_p, settings.min_p)]
    return RowSettings(*columns, filtered=torch.arange(len(columns[0])))


@PATHS
@pytest.mark.parametrize("vocab_size", SIZES)
def test_scaled_logprobs_divide_before_the_softmax_over_the_whole_vocabulary(dtype, vocab_size):
    logits = some_logits(6, vocab_size, dtype)
    temperatures = torch.tensor([0.3, 1.0, 2.0, 0.7, 1.5, 1e-3])
    expected = torch.log_softmax(logits.double() / temperatures.double().unsqueeze(-1), -1)
    found = scaled_logprobs(logits, temperatures)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    for row, temperature in enumerate(temperatures.tolist()):
        assert torch.equal(scaled_logprobs(logits[row : row + 1], temperature), found[row : row + 1])


@PATHS
@pytest.mark.parametrize("vocab_size", SIZES)
def test_selected_scaled_and_drawn_logprobs_are_the_same_bits(dtype, vocab_size):
    logits, temperatures = some_logits(9, vocab_size, dtype), torch.linspace(0.2, 3.0, 9)
    drawn = draw_tokens(logits, settings_of(9, temperature=temperatures), torch.arange(9))
    rows = scaled_logprobs(logits, temperatures).gather(-1, drawn.token_ids[:, None])[:, 0]
    assert torch.equal(rows, drawn.logprobs)
    assert torch.equal(rows, selected_logprobs(logits, drawn.token_ids, temperatures))
    assert torch.equal(rows, selected_logprobs(logits.clone().requires_grad_(), drawn.token_ids, temperatures))
    torch.testing.assert_close(drawn.chances, rows.exp())


@PATHS
def test_a_rows_results_do_not_depend_on_batch_threads_or_place_in_memory(dtype):
    num_rows, vocab_size = 12, 4099
    logits = some_logits(num_rows, vocab_size, dtype)
    logits[3] = logits[3].round()  # ties
    settings = settings_of(
        num_rows, seed=torch.arange(num_rows), temperature=torch.linspace(0.5, 2.0, num_rows),
        top_k=[KEEP_ALL, 1, 7, 60, 3000, KEEP_ALL] * 2, top_p=[1.0, 0.9, 0.5, 1.0] * 3, min_p=[0.0, 0.0, 0.05] * 4,
    )  # fmt: skip
    positions = torch.arange(num_rows)

    def results(logits: Tensor, rows: slice) -> list[Tensor]:
        drawn = draw_tokens(logits, taken(settings, rows), positions[rows])
        selected = selected_logprobs(logits, drawn.token_ids, settings.temperatures[rows])
        scaled = scaled_logprobs(logits, settings.temperatures[rows])
        return [drawn.token_ids, drawn.logprobs, drawn.chances, selected, scaled]

    whole = results(logits, slice(0, num_rows))
    spread = torch.zeros(num_rows, vocab_size + 3, dtype=dtype)[:, 3:]
    spread.copy_(logits)
    transposed = logits.T.contiguous().T
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            for other in (logits, spread, transposed):
                assert all(map(torch.equal, results(other, slice(0, num_rows)), whole))
            for row in range(num_rows):
                rows = slice(row, row + 1)
                aside = torch.zeros(vocab_size + 5, dtype=dtype)[row % 5 :][:vocab_size].copy_(logits[row])
                assert all(map(torch.equal, results(aside[None], rows), [value[rows] for value in whole]))
        finally:
            torch.set_num_threads(threads)


def brute_force(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, float]:
    """Filter one row's probabilities; also return how close top-p or min-p came to another decision."""
    p = torch.softmax(logits.double() / temperature, -1).tolist()
    kept, before, closest = [0.0] * len(p), 0.0, 1.0
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    for rank, token in enumerate(order):
        if rank and rank < top_k and top_p < 1.0:
            closest = min(closest, abs(before - top_p))
        if min_p and p[token] != p[order[0]]:
            closest = min(closest, abs(p[token] / p[order[0]] - min_p))
        if rank < top_k and (before <= top_p or top_p >= 1.0) and p[token] >= min_p * p[order[0]]:
            kept[token] = p[token]
        before += p[token]
    return torch.tensor(kept, dtype=torch.float64), closest


@PATHS
@pytest.mark.parametrize("step", [None, 0.5, 4.0], ids=["distinct", "ties", "many ties"])
@pytest.mark.parametrize("vocab_size", [1, 19, 700, 5003])
def test_filters_keep_what_a_sort_would_and_draws_invert_the_running_sum(dtype, step, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    num_checked, num_noises = 0, 25
    for case in range(12):
        logits = torch.randn(vocab_size, generator=generator) * 3
        logits = (logits / step).round() * step if step else logits
        logits = logits.to(dtype)
        u = torch.rand(4, generator=generator).tolist()
        rule = {
            "temperature": 0.3 + 2 * u[0],
            "top_k": max(1, int(vocab_size ** u[1])) if case % 4 != 1 else KEEP_ALL,
            "top_p": 0.05 + 0.94 * u[2] if case % 4 != 2 else 1.0,
            "min_p": 0.3 * u[3] ** 2 if case % 3 == 0 else 0.0,
        }
        kept, closest = brute_force(logits, **rule)
        if closest < 1e-5:
            continue  # rounding decides
        settings = settings_of(num_noises, seed=torch.arange(num_noises), **rule)
        positions = torch.full((num_noises,), case)
        found = draw_tokens(logits.expand(num_noises, -1), settings, positions).token_ids
        running = kept.cumsum(-1)
        threshold = uniform_noise(settings.seeds, positions) * running[-1]
        for token, value in zip(found.tolist(), threshold.tolist(), strict=True):
            assert kept[token] > 0
            before = running[token - 1].item() if token else 0.0
            if rule["top_k"] > 1:
                assert before - 1e-5 <= value <= running[token].item() + 1e-5
        num_checked += 1
    assert num_checked >= 3


@PATHS
def test_equal_logits_share_the_mass_and_the_noise_names_the_token(dtype):
    noise = uniform_noise(torch.arange(64), torch.arange(64))
    settings = settings_of(64, seed=torch.arange(64))
    found = draw_tokens(torch.zeros(64, 1024, dtype=dtype), settings, torch.arange(64)).token_ids
    assert found.tolist() == (noise * 1024).long().tolist()


@PATHS
def test_all_equal_logits_are_cut_by_index(dtype):
    logits = torch.zeros(1500, 1000, dtype=dtype)
    for settings, last in (({"top_k": 3}, 2), ({"top_p": 0.10001}, 100), ({"top_k": 400, "top_p": 0.9}, 399)):
        found = draw_tokens(logits, settings_of(1500, seed=torch.arange(1500), **settings), torch.zeros(1500).long())
        assert found.token_ids.max() <= last
        assert len(found.token_ids.unique()) > 0.9 * last


# Each path and each setting once; the rest are slow.
WIDE = [
    pytest.param(dtype, settings, id=f"{settings}-{dtype}", marks=[] if row == column else [pytest.mark.slow])
    for row, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64))
    for column, settings in enumerate(({}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.02}))
]


@pytest.mark.parametrize(("dtype", "settings"), WIDE)
def test_draws_from_a_wide_row_follow_its_distribution(dtype, settings):
    logits = some_logits(1, 1037, dtype)
    count = 20_000
    rule = {"temperature": 0.8, "top_k": KEEP_ALL, "top_p": 1.0, "min_p": 0.0, **settings}
    kept, _ = brute_force(logits[0], **rule)
    drawn = draw_tokens(logits.expand(count, -1), settings_of(count, **rule), torch.arange(count))
    wanted = kept / kept.sum() * count
    observed = torch.bincount(drawn.token_ids, minlength=1037).double()
    assert observed[wanted == 0].sum() == 0
    common = wanted >= 5
    cells = [torch.cat([x[common], x[~common].sum()[None]]).numpy() for x in (observed, wanted)]
    keep = cells[1] > 0
    assert stats.chisquare(cells[0][keep], cells[1][keep], sum_check=False).pvalue > 1e-3


@PATHS
@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_broken_reports_nan_and_leaves_its_neighbours_alone(dtype, settings, broken):
    logits = some_logits(4, 1000, dtype)
    rule = settings_of(4, **settings)
    whole = draw_tokens(logits, rule, torch.arange(4))
    logits[1, 7] = logits[2, 999] = broken
    drawn = draw_tokens(logits, rule, torch.arange(4))
    assert drawn.logprobs.isnan().tolist() == [False, True, True, False]
    assert torch.equal(drawn.token_ids[::3], whole.token_ids[::3])
    assert drawn.token_ids.min() >= 0 and drawn.token_ids.max() < 1000
    assert scaled_logprobs(logits, 1.0)[1:3].isnan().all()


@PATHS
def test_tokens_with_a_logit_of_minus_infinity_are_never_drawn(dtype):
    logits = torch.full((200, 300), -torch.inf, dtype=dtype)
    logits[:, [4, 250]] = 1.0
    for settings in ({}, {"top_k": 100}, {"top_p": 0.99}, {"top_k": 1}):
        drawn = draw_tokens(logits, settings_of(200, seed=torch.arange(200), **settings), torch.arange(200))
        assert set(drawn.token_ids.tolist()) == ({4} if "top_k" in settings and settings["top_k"] == 1 else {4, 250})
    assert scaled_logprobs(logits, 1.0)[0, 0] == -torch.inf


@PATHS
@pytest.mark.parametrize("vocab_size", [1, 16, 17, 1025])
def test_gradients_are_those_of_the_formula_in_double(dtype, vocab_size):
    base = some_logits(7, vocab_size, dtype)
    ids = torch.arange(7) * 3 % vocab_size
    temperatures, weights = torch.linspace(0.5, 2.0, 7), torch.randn(7, generator=torch.Generator().manual_seed(1))
    exact = base.clone().double().requires_grad_()
    rows = torch.log_softmax(exact / temperatures.double()[:, None], -1)
    (rows.gather(-1, ids[:, None])[:, 0] * weights).sum().backward()
    wide = torch.zeros(7, 2 * vocab_size, dtype=dtype)
    wide[:, ::2] = base
    picked = base.clone().requires_grad_()
    strided = wide.requires_grad_()
    whole = base.clone().requires_grad_()
    (selected_logprobs(picked, ids, temperatures) * weights).sum().backward()
    (selected_logprobs(strided[:, ::2], ids, temperatures) * weights).sum().backward()
    (scaled_logprobs(whole, temperatures).gather(-1, ids[:, None])[:, 0] * weights).sum().backward()
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    for grad in (picked.grad, strided.grad[:, ::2], whole.grad):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), exact.grad, **tolerance)


@PATHS
def test_selected_logprobs_keep_no_copy_of_the_logits_for_the_backward_pass(dtype):
    logits = some_logits(64, 4096, dtype).requires_grad_()
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        selected_logprobs(logits, torch.arange(64), 0.7)
    others = [t for t in kept if t.data_ptr() != logits.data_ptr()]
    assert len(kept) > len(others) and sum(t.numel() for t in others) <= 64 * 4


def test_tokens_beyond_the_vocabulary_are_refused():
    for ids in ([0, 20], [-1, 3]):
        with pytest.raises(ValueError, match="the vocabulary has 20"):
            selected_logprobs(torch.zeros(2, 20), torch.tensor(ids))
    with pytest.raises(ValueError, match="2 rows of logits"):
        selected_logprobs(torch.zeros(2, 20), torch.zeros(3, dtype=torch.int64))
