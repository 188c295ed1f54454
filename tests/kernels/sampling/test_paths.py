"""All paths choose the same tokens, bit for bit, from equal logits: random settings on hostile rows."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from lockstep.kernels.sampling import cpp as native_sampling
from lockstep.kernels.sampling.draws import KEEP_ALL, RowSettings, draw_tokens, reference_draw
from lockstep.kernels.sampling.reference import kept_tokens, weights
from lockstep.tests.optional_packages import needs_triton

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """Rows to draw from, on the CPU."""

    logits: Tensor
    settings: RowSettings
    positions: Tensor
    reshaped: tuple[Tensor, Tensor] | None = None
    allowed: tuple[Tensor, Tensor] | None = None


def plain(x: Tensor) -> Tensor:
    return x


def with_ties(x: Tensor) -> Tensor:
    return x.round()


def half_banned(x: Tensor) -> Tensor:
    x = x.masked_fill(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.5, -torch.inf)
    x[:, 0] = 0.5
    return x


def one_token(x: Tensor) -> Tensor:
    return torch.full_like(x, -torch.inf).index_fill(1, torch.tensor([x.shape[1] // 2]), 3.0)


def zeros_of_both_signs(x: Tensor) -> Tensor:
    return torch.zeros_like(x).masked_fill(x > 0, -0.0)


def huge(x: Tensor) -> Tensor:
    return x * 1e37


def subnormal(x: Tensor) -> Tensor:
    return x * 1e-40


def biased(x: Tensor) -> Tensor:
    x[:, ::3] += 1e30
    return x


def ascending(x: Tensor) -> Tensor:
    return x.sort(-1).values * 4


def one_far_above(x: Tensor) -> Tensor:
    x[:, -1] += 60.0
    return x


HOSTILE = [
    plain, with_ties, half_banned, one_token, zeros_of_both_signs, huge, subnormal, biased, ascending, one_far_above,
]  # fmt: skip


def a_case(shape, num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """Draw logits and settings: temperatures from 1e-6 to 10, each filter in about half of the rows, masks."""
    generator = torch.Generator().manual_seed(seed + vocab_size)

    def rand() -> Tensor:
        return torch.rand(num_rows, generator=generator)

    logits = shape(torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
    top_k = (vocab_size ** rand()).long().clamp(min=1)
    top_k[rand() < 0.5] = KEEP_ALL
    top_p = rand().double().clamp(min=1e-9).masked_fill_(rand() < 0.5, 1.0)
    min_p = (rand() ** 3).masked_fill_(rand() < 0.6, 0.0)
    heat = torch.where(rand() < 0.5, 10 ** (rand() * 7 - 6), torch.ones(num_rows))
    settings = RowSettings(heat, torch.randint(-(2**62), 2**62, (num_rows,), generator=generator), top_k, top_p, min_p)
    masks = torch.randint(0, 256, (num_rows // 3, vocab_size // 8 + 1), generator=generator).to(torch.uint8)
    masks[:, vocab_size // 16] |= 1 << (vocab_size // 2 % 8)
    return Case(
        logits, settings, torch.randint(0, 2**40, (num_rows,), generator=generator),
        (torch.arange(0, num_rows, 4), shape(torch.randn(len(range(0, num_rows, 4)), vocab_size, generator=generator))),
        (torch.arange(num_rows // 3), masks),
    )  # fmt: skip


def drawn_by(path: str, case: Case) -> Tensor:
    if path == "torch":
        return reference_draw(case.logits, case.settings, case.positions, case.reshaped, case.allowed).token_ids
    if path == "cpp":
        assert native_sampling.serves(case.logits)
        return draw_tokens(case.logits, case.settings, case.positions, case.reshaped, case.allowed).token_ids
    needs_triton()
    from lockstep.kernels.sampling import triton_draws

    settings = RowSettings(*(getattr(case.settings, field.name).to(GPU) for field in fields(RowSettings)))
    keys, filters = (settings.seeds, case.positions.to(GPU)), (settings.top_k, settings.top_p, settings.min_p)
    pairs = [None if pair is None else tuple(part.to(GPU) for part in pair) for pair in (case.reshaped, case.allowed)]
    return triton_draws.draw(case.logits.to(GPU), settings.temperatures, keys, filters, *pairs)[0].cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", HOSTILE)
def test_cpp_draws_the_references_tokens(shape, dtype):
    for vocab_size in (1, 15, 17, 300, 1025, 4999):
        case = a_case(shape, 120, vocab_size, dtype)
        assert torch.equal(drawn_by("cpp", case), drawn_by("torch", case)), vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
@pytest.mark.parametrize("shape", [plain, with_ties, ascending])
def test_cpp_draws_the_references_tokens_of_a_real_vocabulary(shape, vocab_size):
    case = a_case(shape, 40, vocab_size, torch.bfloat16)
    assert torch.equal(drawn_by("cpp", case), drawn_by("torch", case))


def test_triton_draws_the_references_tokens():
    for number, shape in enumerate(HOSTILE):
        case = a_case(shape, 3, 40, (torch.float32, torch.bfloat16)[number % 2])
        assert torch.equal(drawn_by("triton", case), drawn_by("torch", case)), shape


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", HOSTILE)
def test_triton_draws_the_references_tokens_from_several_tiles(shape, dtype):
    for vocab_size in (1, 17, 5000):
        case = a_case(shape, 12, vocab_size, dtype)
        assert torch.equal(drawn_by("triton", case), drawn_by("torch", case)), vocab_size


@pytest.mark.parametrize("path", ["torch", "cpp", "triton"])
def test_a_row_without_a_token_to_draw_gets_token_0(path):
    case = a_case(plain, 6, 40, torch.float32)
    for row, value in enumerate((torch.nan, torch.inf)):
        case.logits[row, 7] = value
    case.logits[2] = -torch.inf
    case = Case(case.logits[:3], RowSettings(*(getattr(case.settings, f.name)[:3] for f in fields(RowSettings))),
                case.positions[:3])  # fmt: skip
    assert drawn_by(path, case).tolist() == [0, 0, 0]


def test_a_filters_masses_are_integers_and_its_cut_is_exact():
    """Compute the cut of one row in plain integers."""
    generator = torch.Generator().manual_seed(5)
    for vocab_size in (7, 200):
        for number in range(40):
            x = (torch.randn(vocab_size, generator=generator) * 2).round() if number % 2 else torch.randn(vocab_size)
            heat, top_p = 0.2 + number / 20, 0.02 + 0.024 * number
            inverse = torch.tensor(1.0) / torch.tensor(heat)
            masses = [int(w * 2**40) for w in weights((x - x.max()) * inverse).tolist()]
            limit, before, kept = int(float(sum(masses)) * top_p), 0, []
            for token in sorted(range(vocab_size), key=lambda i: (-x[i].item(), i)):
                if before <= limit and len(kept) < 50:
                    kept.append(token)
                before += masses[token]
            limits = torch.tensor([50]), torch.tensor([top_p], dtype=torch.float64), torch.zeros(1)
            found = kept_tokens(x[None], torch.tensor([heat]), *limits)
            assert found is not None and found[0].nonzero().flatten().tolist() == sorted(kept)
