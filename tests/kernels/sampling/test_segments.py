"""Triton's draws and log-probabilities from rows of several segments: the reference's tokens, and a row's own bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from lockstep.kernels.sampling import triton_cut, triton_draws, triton_logprobs, triton_scan
from lockstep.kernels.sampling.draws import KEEP_ALL, Drawn, RowSettings, reference_draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEGMENT = triton_scan.SEGMENT_V
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of rows with NaN or -inf
SIZES = [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 37]
FILTERS = [
    (KEEP_ALL, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (KEEP_ALL, 0.2, 0.0), (KEEP_ALL, 1.0, 0.3), (50, 0.95, 0.0),
    (SEGMENT + 3, 0.999, 0.0), (40, 0.9, 0.05),
]  # fmt: skip


def normal(rows: int, vocab_size: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def settings_of(rows: int, filters: list[tuple[int, float, float]], heat: float | None = None) -> RowSettings:
    """Take the filters in turn, and temperatures from 0.5 to 1.7 if none is given."""
    top_k, top_p, min_p = zip(*(filters[i % len(filters)] for i in range(rows)), strict=True)
    heats = torch.linspace(0.5, 1.7, rows) if heat is None else torch.full((rows,), heat)
    limits = (torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p))
    return RowSettings(heats, torch.arange(rows) * 31, *limits)


def drawn(logits: Tensor, settings: RowSettings, positions: Tensor | None = None) -> Drawn:
    positions = torch.arange(len(logits)) if positions is None else positions
    heats, seeds, *filters = (value.to(DEVICE) for value in vars(settings).values())
    keys = (seeds, positions.to(DEVICE))
    return Drawn(*(out.cpu() for out in triton_draws.draw(logits.to(DEVICE), heats, keys, tuple(filters), None, None)))


def assert_like_the_reference(logits: Tensor, settings: RowSettings) -> Drawn:
    found, expected = drawn(logits, settings), reference_draw(logits, settings, torch.arange(len(logits)))
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(found.chances, expected.chances, rtol=1e-4, atol=1e-9, equal_nan=True)
    return found


def states_of(logits: Tensor, settings: RowSettings) -> set[int]:
    """Tell the states of the rows' cuts: see `triton_cut.VERDICT`."""
    heats, seeds, top_k, top_p, min_p = (value.to(DEVICE) for value in vars(settings).values())
    shape = (len(logits), triton_scan.LEVELS.value, 2, triton_scan.BINS.value)
    bins = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    drawing = triton_scan.Drawing(seeds, torch.arange(len(logits), device=DEVICE), top_k, top_p, bins)
    logits = logits.to(DEVICE)
    parts = triton_scan.scan(logits, heats, drawing)
    return set(triton_cut.draw_again(logits, heats, min_p, drawing, parts)[0][:, 0].tolist())


@pytest.mark.parametrize("vocab_size", SIZES)
def test_rows_that_end_within_at_and_after_a_segment_are_drawn_as_the_reference_draws(vocab_size: int) -> None:
    assert_like_the_reference(normal(len(FILTERS), vocab_size), settings_of(len(FILTERS), FILTERS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_many_rows_of_several_segments_are_drawn_as_the_reference_draws(dtype: torch.dtype, spread: float) -> None:
    rows = 2 * len(FILTERS)
    logits = normal(rows, 3 * SEGMENT + 1000, spread, seed=5).to(dtype)
    assert_like_the_reference(logits, settings_of(rows, FILTERS))
    assert states_of(logits[: len(FILTERS)], settings_of(len(FILTERS), FILTERS)) >= {0, 2}


@pytest.mark.parametrize("token", [0, SEGMENT - 1, SEGMENT, 2 * SEGMENT + 36])
def test_a_winner_is_found_in_every_segment(token: int) -> None:
    logits = normal(len(FILTERS), 2 * SEGMENT + 37)
    logits[:, token] = 90.0
    assert drawn(logits, settings_of(len(FILTERS), FILTERS)).token_ids.tolist() == [token] * len(FILTERS)


def test_of_equal_most_likely_tokens_in_several_segments_top_k_1_takes_the_first() -> None:
    logits = normal(3, 2 * SEGMENT + 37)
    for row, tokens in enumerate(([SEGMENT + 4, 2 * SEGMENT + 2], [7, 1031, SEGMENT + 7], [2 * SEGMENT, SEGMENT - 1])):
        logits[row, tokens] = 20.0
    assert drawn(logits, settings_of(3, [(1, 1.0, 0.0)])).token_ids.tolist() == [SEGMENT + 4, 7, SEGMENT - 1]


@triton.jit
def _winner_of_scores(scores_ptr, out_ptr):
    tl.store(out_ptr, triton_scan.folded_winner(scores_ptr, 5, 8))


def test_of_equal_scores_in_several_segments_the_first_token_wins() -> None:
    highs = [3.0, 5.0, 5.0, 5.0, 5.0]
    lows, tokens = [9.0, -1.0, 0.5, 0.5, 0.25], [4.0, 8200.0, 16_500.0, 25_000.0, 33_000.0]
    scores = torch.tensor([highs, lows, tokens], dtype=torch.float64, device=DEVICE)
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _winner_of_scores[(1,)](scores, out, num_warps=1)
    assert out.tolist() == [16_500]


@pytest.mark.parametrize("top_k", [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 5])
def test_equal_logits_are_cut_by_token_across_segments(top_k: int) -> None:
    rows, vocab_size = 6, 2 * SEGMENT + 37
    for logits in (torch.zeros(rows, vocab_size), (normal(rows, vocab_size) > -1).float()):
        settings = settings_of(rows, [(top_k, 1.0, 0.0), (KEEP_ALL, top_k / vocab_size, 0.0)], heat=1.0)
        assert_like_the_reference(logits, settings)


def test_ties_at_a_cut_above_the_winner_are_counted_over_segments() -> None:
    """Cut within 200 tokens of the second highest logit, most of which are in later segments."""
    rows, vocab_size = 12, 2 * SEGMENT + 37
    logits = normal(rows, vocab_size, 0.01)
    places = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(2))
    logits[:, places[:200]], logits[:, places[200:210]] = 2.0, 2.5
    settings = settings_of(rows, [(60, 1.0, 0.0), (KEEP_ALL, 0.02, 0.0), (200, 0.05, 0.0)], heat=1.0)
    found = assert_like_the_reference(logits, settings)
    assert states_of(logits, settings) >= {2} and (found.token_ids >= SEGMENT).any()
    assert (logits[0, found.token_ids] == 2.0).any()


def test_a_cut_may_be_below_a_winner_that_min_p_removes() -> None:
    rows = 12
    logits = normal(rows, SEGMENT + 500, 1.0)
    settings = settings_of(
        rows, [(20_000, 0.9999, 0.5), (KEEP_ALL, 1.0, 0.5), (40, 1.0, 0.5), (KEEP_ALL, 0.3, 0.9)], heat=2.0
    )
    assert_like_the_reference(logits, settings)
    assert states_of(logits, settings) == {1, 2}


@pytest.mark.parametrize("place", [3, SEGMENT + 3, 2 * SEGMENT + 36])
def test_banned_and_broken_tokens_in_any_segment(place: int) -> None:
    logits = normal(9, 2 * SEGMENT + 37)
    segment = slice(place // SEGMENT * SEGMENT, (place // SEGMENT + 1) * SEGMENT)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row::3, place] = value
    logits[2::3, segment] = -torch.inf  # a whole segment
    found = assert_like_the_reference(logits, settings_of(9, [FILTERS[0]] * 3 + [FILTERS[5]] * 3 + [FILTERS[1]] * 3))
    assert found.logprobs.isnan().tolist() == [True, True, False] * 3
    logits[:, :] = -torch.inf
    assert assert_like_the_reference(logits, settings_of(9, FILTERS)).logprobs.isnan().all()
    logits[:, place] = -5.0
    assert drawn(logits, settings_of(9, FILTERS)).token_ids.tolist() == [place] * 9


@pytest.mark.parametrize(
    ("factor", "offset", "heat"),
    [(1e37, 0.0, 1.0), (1.0, 3e4, 1.0), (1.0, -2e5, 1.0), (1.0, 1e6, 1.0), (3.0, 0.0, 1e-6), (1e-40, 0.0, 1e-3),
     (1e37, 0.0, 1e-6), (-1e37, -1e37, 1e-5)],
)  # fmt: skip
def test_a_winner_is_exact_where_scaled_logits_are_rounded_or_infinite(factor, offset, heat) -> None:
    logits, settings = normal(6, SEGMENT + 300) * factor + offset, settings_of(6, FILTERS[:6], heat)
    expected = reference_draw(logits, settings, torch.arange(6))
    assert drawn(logits, settings).token_ids.tolist() == expected.token_ids.tolist()


def test_likely_tokens_that_share_a_lane_are_all_scored() -> None:
    rows = 24
    logits = normal(rows, SEGMENT + 300)
    logits[:, [5, 261, 1029, 2053, 2054]] = 40.0
    found = assert_like_the_reference(logits, settings_of(rows, [(KEEP_ALL, 1.0, 0.0)], heat=1.0))
    assert len(found.token_ids.unique()) == 5


def places_of(rows: Tensor) -> list[Tensor]:
    """Return the same rows where they are, at an odd address with an odd stride, and with columns apart."""
    odd = torch.cat([rows[:, :1], rows], dim=-1)[:, 1:]
    return [rows, odd, torch.stack([rows, rows], dim=-1)[..., 0]]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_row_of_several_segments_has_the_same_bits_among_40_rows_and_alone(dtype: torch.dtype) -> None:
    rows = 40
    logits, settings = normal(rows, SEGMENT + 999).to(dtype), settings_of(rows, FILTERS)
    whole = drawn(logits, settings)
    stats = triton_scan.statistics(logits.to(DEVICE), settings.temperatures.to(DEVICE))
    one = slice(13, 14)
    fields = {name: value[one] for name, value in vars(settings).items()}
    for place in places_of(logits.to(DEVICE)[one]):
        heat = settings.temperatures[one].to(DEVICE)
        assert torch.equal(triton_scan.statistics(triton_scan.dense(place), heat), stats[one])
        alone = drawn(place, RowSettings(**fields), torch.arange(rows)[one])
        for name in ("token_ids", "logprobs", "chances"):
            assert torch.equal(getattr(alone, name), getattr(whole, name)[one]), name


def test_a_draw_and_the_trainer_get_the_same_bits() -> None:
    rows = len(FILTERS)
    logits, settings = normal(rows, 2 * SEGMENT + 37, 3.0, seed=3), settings_of(rows, FILTERS)
    found, heats = drawn(logits, settings), settings.temperatures.to(DEVICE)
    logprobs, stats = triton_logprobs.selected(logits.to(DEVICE), found.token_ids.to(DEVICE), heats)
    assert torch.equal(logprobs.cpu(), found.logprobs)
    assert torch.equal(stats, triton_scan.statistics(logits.to(DEVICE), heats))
    exact = logits.double() / settings.temperatures.double()[:, None]
    expected = torch.log_softmax(exact, -1).gather(-1, found.token_ids[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=1e-6, atol=5e-6)
