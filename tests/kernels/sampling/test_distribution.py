"""Draws follow softmax(logits / temperature), and each filter's part of it: chi-square over a million draws a path.

The interpreter takes fewer draws in Triton's place: its tokens are the reference's, bit for bit (test_paths.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.kernels.sampling.draws import KEEP_ALL, RowSettings, draw_tokens, reference_draw
from lockstep.tests.optional_packages import needs_triton

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
MILLION = 1_000_000
AT_A_TIME = 50_000

SHAPES = {
    "two tokens, 1 to 999": torch.tensor([0.999, 0.001]).log(),
    "one token": torch.tensor([3.0]),
    "flat": torch.zeros(40),
    "normal": torch.randn(40, generator=torch.Generator().manual_seed(0)) * 2,
    "steep": -0.4 * torch.arange(40.0),
    "ties": (torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2).round(),
    "far from zero": torch.randn(40, generator=torch.Generator().manual_seed(2)) + 1000,
    "banned tokens": torch.randn(40, generator=torch.Generator().manual_seed(3)).index_fill(
        0, torch.arange(0, 40, 3), -torch.inf
    ),
}
FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all filters": {"temperature": 1.4, "top_k": 12, "top_p": 0.93, "min_p": 0.03},
}
# Each shape and each filter once on every path.
CASES = [("normal", name) for name in FILTERS] + [(name, "plain") for name in SHAPES if name != "normal"]


def exact(logits: Tensor, temperature=1.0, top_k=KEEP_ALL, top_p=1.0, min_p=0.0) -> Tensor:
    p = torch.softmax(logits.double() / temperature, -1)
    ranked = p.sort(descending=True, stable=True)
    before = ranked.values.cumsum(-1) - ranked.values
    kept = (torch.arange(len(p)) < top_k) & ((before <= top_p) | (top_p >= 1)) & (ranked.values >= min_p * p.max())
    p = torch.zeros_like(p).scatter(0, ranked.indices, ranked.values * kept)
    return p / p.sum()


def counted(path: str, logits: Tensor, count: int, **rule: float) -> Tensor:
    """Count the tokens of `count` draws: half with neighbouring seeds, half with neighbouring positions."""
    found = torch.zeros(len(logits), dtype=torch.int64)
    for start in range(0, count, AT_A_TIME):
        numbers = torch.arange(start, min(start + AT_A_TIME, count), device=DEVICE if path == "triton" else None)
        half = numbers < count // 2

        def column(name: str, default: float, dtype: torch.dtype, like: Tensor = numbers) -> Tensor:
            return torch.full_like(like, rule.get(name, default), dtype=dtype)

        settings = RowSettings(
            column("temperature", 1.0, torch.float32), torch.where(half, numbers, 17),
            column("top_k", KEEP_ALL, torch.int64), column("top_p", 1.0, torch.float64),
            column("min_p", 0.0, torch.float32),
        )  # fmt: skip
        positions, rows = torch.where(half, 5, numbers), logits.to(numbers.device).expand(len(numbers), -1)
        if path == "triton":
            from lockstep.kernels.sampling import triton_draws

            filters = (settings.top_k, settings.top_p, settings.min_p)
            keys = (settings.seeds, positions)
            ids = triton_draws.draw(rows, settings.temperatures, keys, filters, None, None)[0].cpu()
        else:
            draw = draw_tokens if path == "cpp" else reference_draw
            ids = draw(rows, settings, positions).token_ids
        found += torch.bincount(ids, minlength=len(logits))
    return found


def check(path: str, shape: str, rule: str, count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    logits = SHAPES[shape]
    wanted = exact(logits, **FILTERS[rule]) * count
    observed = counted(path, logits, count, **FILTERS[rule]).double()
    assert observed[wanted == 0].sum() == 0
    common = wanted >= 5
    cells = [torch.cat([x[common], x[~common].sum()[None]]) for x in (observed, wanted)]
    is_possible = cells[1] > 0
    if is_possible.sum() > 1:
        cells = [x[is_possible].numpy() for x in cells]
        assert stats.chisquare(*cells, sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize(("shape", "rule"), CASES)
def test_a_million_draws_in_cpp_follow_the_distribution(shape, rule):
    check("cpp", shape, rule, MILLION)


@pytest.mark.parametrize(("shape", "rule"), CASES)
def test_draws_in_pytorch_follow_the_distribution(shape, rule):
    check("torch", shape, rule, 50_000)


@pytest.mark.parametrize(
    ("shape", "rule"),
    [pytest.param(*case, marks=pytest.mark.slow if number % 6 == 0 else pytest.mark.exhaustive)
     for number, case in enumerate(CASES)],
)  # fmt: skip
def test_a_million_draws_in_pytorch_follow_the_distribution(shape, rule):
    check("torch", shape, rule, MILLION)


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="Triton compiles here")
@pytest.mark.parametrize(("shape", "rule"), CASES[:: len(FILTERS) - 1])
def test_draws_in_interpreted_triton_follow_the_distribution(shape, rule):
    needs_triton()
    check("triton", shape, rule, 200)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
@pytest.mark.parametrize(("shape", "rule"), CASES)
def test_a_million_draws_in_compiled_triton_follow_the_distribution(shape, rule):
    needs_triton()
    check("triton", shape, rule, MILLION)
