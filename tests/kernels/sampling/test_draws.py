"""Tests of log-probabilities and draws: each path against plain arithmetic, and against itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.kernels.sampling.draws import KEEP_ALL, RowSettings, draw_tokens, reference_draw
from lockstep.kernels.sampling.logprobs import scaled_logprobs, selected_logprobs
from lockstep.kernels.sampling.noise import gumbel_noise, row_keys

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
    )


def taken(settings: RowSettings, rows: slice) -> RowSettings:
    """Select the settings of these rows."""
    columns = [c[rows] for c in (settings.temperatures, settings.seeds, settings.top_k, settings.top_p, settings.min_p)]
    return RowSettings(*columns)


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
@pytest.mark.parametrize("vocab_size", [5, 33, 50])
def test_a_rows_draw_does_not_depend_on_a_row_of_a_larger_vocabulary_before_it(dtype, vocab_size):
    num_rows = 2000
    logits = some_logits(num_rows, vocab_size, dtype)
    settings = settings_of(num_rows, seed=torch.arange(num_rows), top_k=[vocab_size] * num_rows, top_p=0.5)
    positions = torch.zeros(num_rows, dtype=torch.int64)
    alone = draw_tokens(logits, settings, positions).token_ids
    assert torch.equal(alone, reference_draw(logits, settings, positions).token_ids)
    draw_tokens(some_logits(1, 4099, dtype) - 6, settings_of(1, top_k=[2]), positions[:1])
    assert torch.equal(draw_tokens(logits, settings, positions).token_ids, alone)


@PATHS
@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_token_ids_of_any_integers_select_the_same_logprobs(dtype, kind):
    logits, ids = some_logits(6, 257, dtype), torch.tensor([0, 3, 99, 100, 41, 7])
    expected = selected_logprobs(logits, ids)
    assert torch.equal(selected_logprobs(logits, ids.to(kind)), expected)
    gradients = []
    for its_ids in (ids, ids.to(kind)):
        leaf = logits.clone().requires_grad_()
        selected_logprobs(leaf, its_ids).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    with pytest.raises(ValueError, match=r"token_ids are torch\.float32, not integers"):
        selected_logprobs(logits, ids.float())


@PATHS
def test_a_gradient_that_is_to_be_differentiated_again_is_refused(dtype):
    logits = some_logits(6, 257, dtype).requires_grad_()
    for function in (lambda: selected_logprobs(logits, torch.arange(6)), lambda: scaled_logprobs(logits, 1.0)):
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(function().mean(), [logits], create_graph=True)


@PATHS
def test_temperatures_and_shapes_that_do_not_fit_are_refused(dtype):
    logits, ids = some_logits(6, 257, dtype), torch.arange(6)
    assert torch.equal(selected_logprobs(logits, ids, torch.tensor(0.7)), selected_logprobs(logits, ids, 0.7))
    for function in (scaled_logprobs, lambda *given: selected_logprobs(given[0], ids, given[1])):
        with pytest.raises(ValueError, match=r"temperatures of shape \[3\] for 6 rows"):
            function(logits, torch.ones(3))
    with pytest.raises(ValueError, match=r"logits of shape \[2, 3, 257\], not \[rows, vocabulary\]"):
        selected_logprobs(logits.view(2, 3, 257), ids.view(2, 3))


@PATHS
def test_a_temperature_that_means_greedy_stands_for_one_in_tensors_as_in_numbers(dtype):
    logits, ids = some_logits(4, 257, dtype), torch.arange(4)
    temperatures = torch.tensor([0.0, 0.7, 1e-7, 1.0])
    selected, scaled = selected_logprobs(logits, ids, temperatures), scaled_logprobs(logits, temperatures)
    for row, number in enumerate((0.0, 0.7, 1e-7, 1.0)):
        one = logits[row : row + 1]
        assert torch.equal(selected[row : row + 1], selected_logprobs(one, ids[row : row + 1], number))
        assert torch.equal(scaled[row : row + 1], scaled_logprobs(one, number))
    assert torch.equal(selected[0], selected_logprobs(logits[:1], ids[:1])[0])


@PATHS
@pytest.mark.parametrize("name", ["temperatures", "seeds", "top_k", "top_p", "min_p", "positions"])
def test_settings_that_lie_apart_in_memory_are_read_as_those_that_lie_together(dtype, name):
    num_rows, logits = 64, some_logits(64, 257, dtype)
    given = settings_of(num_rows, seed=torch.arange(num_rows), temperature=torch.linspace(0.5, 2, num_rows), top_k=9,
                        top_p=torch.linspace(0.3, 0.9, num_rows), min_p=0.05)  # fmt: skip
    columns = {**vars(given), "positions": torch.arange(num_rows)}
    together = draw_tokens(logits, given, columns["positions"])
    columns[name] = torch.stack([torch.zeros_like(columns[name]) + 3, columns[name]], 1)[:, 1]
    assert not columns[name].is_contiguous()
    positions = columns.pop("positions")
    apart = draw_tokens(logits, RowSettings(**columns), positions)
    for expected, found in zip(vars(together).values(), vars(apart).values(), strict=True):
        assert torch.equal(expected, found)


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


ALL = {"temperature": 1.0, "top_k": KEEP_ALL, "top_p": 1.0, "min_p": 0.0}


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
def test_filters_keep_what_a_sort_would_and_the_largest_score_wins(dtype, step, vocab_size):
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
        noise = gumbel_noise(row_keys(settings.seeds, positions).unsqueeze(-1), torch.arange(vocab_size))
        scores = (kept.log() + noise).masked_fill(kept == 0, -torch.inf)
        reached = scores.gather(-1, found.unsqueeze(-1)).squeeze(-1)
        assert (kept[found] > 0).all()
        if rule["top_k"] > 1:
            assert (reached > scores.amax(-1) - 1e-6).all()
        num_checked += 1
    assert num_checked >= 3


@PATHS
def test_of_equal_logits_the_largest_noise_wins(dtype):
    noise = gumbel_noise(row_keys(torch.arange(64), torch.arange(64)).unsqueeze(-1), torch.arange(1024))
    settings = settings_of(64, seed=torch.arange(64))
    for logit in (0.0, -7.5, 1e30):
        found = draw_tokens(torch.full((64, 1024), logit, dtype=dtype), settings, torch.arange(64)).token_ids
        assert found.tolist() == noise.argmax(-1).tolist()


@PATHS
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.3}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}], ids=str
)
def test_what_removes_other_tokens_keeps_the_choice(dtype, settings):
    """Remove half of the other tokens by a mask, one by one by -inf, and the less likely ones by a filter."""
    num_rows, vocab_size = 200, 300
    logits = some_logits(num_rows, vocab_size, dtype, seed=3)
    rule = settings_of(num_rows, seed=torch.arange(num_rows), **settings)
    free = draw_tokens(logits, settings_of(num_rows, seed=torch.arange(num_rows)), torch.arange(num_rows)).token_ids
    chosen = draw_tokens(logits, rule, torch.arange(num_rows)).token_ids
    if "temperature" not in settings and settings:
        kept = torch.stack(
            [brute_force(row, **{**ALL, **settings})[0][id] > 0 for row, id in zip(logits, free, strict=True)]
        )
        assert kept.any() and not kept.all()
        assert torch.equal(chosen[kept], free[kept])
        return
    allowed = torch.rand(num_rows, vocab_size, generator=torch.Generator().manual_seed(4)) < 0.5
    allowed.scatter_(1, chosen.unsqueeze(-1), True)
    bits = torch.nn.functional.pad(allowed, (0, 4)).view(num_rows, -1, 8).long()
    packed = (bits << torch.arange(8)).sum(-1).to(torch.uint8)
    masked = draw_tokens(logits, rule, torch.arange(num_rows), allowed=(torch.arange(num_rows), packed))
    banned = draw_tokens(logits.masked_fill(~allowed, -torch.inf), rule, torch.arange(num_rows))
    assert torch.equal(masked.token_ids, chosen) and torch.equal(banned.token_ids, chosen)


@PATHS
def test_nearly_equal_policies_draw_the_same_token_as_often_as_they_can(dtype):
    """Compare with the best that two distributions can do without communication: (1 - TV) / (1 + TV) (Daliri et al.,
    arXiv 2408.07978). One number a row, turned into a token by a running sum, agrees far less often."""
    count, vocab_size = 10_000, 1000
    logits = some_logits(1, vocab_size, torch.float64)[0]
    other = logits + 0.03 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    p, q = logits.to(dtype).double().softmax(-1), other.to(dtype).double().softmax(-1)
    distance = 0.5 * (p - q).abs().sum().item()
    settings = settings_of(count, seed=torch.arange(count))
    drawn = [
        draw_tokens(x.to(dtype).expand(count, -1), settings, torch.zeros(count).long()).token_ids
        for x in (logits, other)
    ]
    differ = (drawn[0] != drawn[1]).double().mean().item()
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    by_running_sum = [torch.searchsorted(x.cumsum(-1), uniform) for x in (p, q)]
    differ_by_running_sum = (by_running_sum[0] != by_running_sum[1]).double().mean().item()
    at_most = 2 * distance / (1 + distance)
    assert 0.003 < distance < 0.05
    assert differ < at_most + 4 * math.sqrt(at_most / count)
    assert differ_by_running_sum > 3 * differ


def test_denormal_numbers_that_the_processor_flushes_change_no_draw():
    """The last of the k most likely tokens has the logit 0: the number before it is a denormal one."""
    logits = torch.full((1, 64), -3.0)
    logits[0, [5, 9, 11]] = torch.tensor([4.0, 0.0, 0.0])

    def drawn() -> set[int]:
        settings = (settings_of(1, temperature=3.0, seed=seed, top_k=3, top_p=0.05) for seed in range(100))
        return {int(draw_tokens(logits, its, torch.tensor([0])).token_ids) for its in settings}

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes none")
    try:
        assert drawn() == {5}
    finally:
        torch.set_flush_denormal(False)
    assert drawn() == {5}


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
    stats = pytest.importorskip("scipy.stats")
    logits = some_logits(1, 1037, dtype)
    count = 20_000
    rule = {**ALL, "temperature": 0.8, **settings}
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
