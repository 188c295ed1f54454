"""Tests of Triton's log-probabilities, draws and RMS norm, interpreted without a GPU: values, gradients, and bits of a
row that do not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

from lockstep.kernels.layers import triton_rms_norm
from lockstep.kernels.layers.rms_norm import NormRule, reference_rms_norm, rms_norm
from lockstep.kernels.sampling import draws as sampling
from lockstep.kernels.sampling import triton_draws as triton_sampling
from lockstep.kernels.sampling import triton_logprobs, triton_scan
from lockstep.kernels.sampling.logprobs import selected_logprobs

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
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


def draw(logits: torch.Tensor, rows: slice, top_k: list[int], top_p: list[float], min_p: list[float]):
    count, limits = len(logits), [torch.tensor(top_k), torch.tensor(top_p).double(), torch.tensor(min_p)]
    keys = (torch.arange(count, device=DEVICE)[rows], torch.arange(count, device=DEVICE)[rows] * 5)
    filters = tuple(limit.to(DEVICE)[rows] for limit in limits)
    return triton_sampling.draw(logits[rows], temperatures(count)[rows], keys, filters, None, None), keys, filters


SETTINGS = [(EVERY, 1.0, 0.0), (5, 1.0, 0.0), (EVERY, 0.7, 0.0), (EVERY, 1.0, 0.1), (9, 0.8, 0.05), (1, 1.0, 0.0)]


def check_draws(vocab_size: int, rounds: int) -> None:
    logits = noise(len(SETTINGS) * rounds, vocab_size)
    logits[:, 5] = logits[:, 7]  # two equal logits: a filter may keep the first alone
    (ids, logprobs, chances), keys, filters = draw(logits, slice(None), *zip(*SETTINGS * rounds, strict=True))
    expected = sampling.reference_draw(
        logits, sampling.RowSettings(temperatures(len(logits)), keys[0], *filters), keys[1]
    )
    assert ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs)
    torch.testing.assert_close(chances, expected.chances)


def test_draws_with_every_filter_are_those_of_the_reference() -> None:
    check_draws(40, 1)


@pytest.mark.slow
def test_draws_from_several_tiles_are_those_of_the_reference() -> None:
    check_draws(5000, 5)


@pytest.mark.skipif(HAS_GPU, reason="counts the interpreter's reads")
@pytest.mark.parametrize(
    ("setting", "passes"),
    [
        ((EVERY, 1.0, 0.0), 1), ((1, 1.0, 0.0), 1), ((2000, 1.0, 0.0), 2), ((EVERY, 1.0, 0.9), 2),
        ((3, 0.01, 0.0), 5), ((EVERY, 0.01, 0.0), 5), ((3, 0.3, 0.9), 5),
    ],
)  # fmt: skip
def test_a_row_is_read_once_and_filters_read_it_once_more_or_four_times_where_they_remove_its_winner(
    monkeypatch: pytest.MonkeyPatch, setting: tuple[int, float, float], passes: int
) -> None:
    reads, load = [], interpreter.InterpreterBuilder.create_masked_load
    whole = (triton_scan.BLOCK_V,)

    def counted(
        builder: object, pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle, *others: object
    ) -> object:
        if pointers.data.shape == whole and pointers.dtype.element_ty is tl.float32 and mask.data.any():
            reads.append(1)
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted)
    draw(noise(1, 2 * whole[0]), slice(None), *([value] for value in setting))
    assert len(reads) / 2 == passes <= triton_sampling.MOST_PASSES


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    logits, settings = noise(4, 4100), ([EVERY, 1, EVERY, 4], [1.0, 1.0, 1.0, 0.9], [0.0, 0.0, 0.2, 0.0])
    whole, _, _ = draw(logits, slice(None), *settings)
    for rows in (slice(0, 1), slice(2, 4)):
        alone, _, _ = draw(logits, rows, *settings)
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_rows_with_other_logits_or_a_grammar_are_drawn_from_those_and_reported_by_the_models(
    dtype: torch.dtype,
) -> None:
    logits, count = noise(5, 21, dtype=dtype), 5
    before = logits.clone()
    # Row 3 has both. Masks are longer or shorter than the vocabulary: tokens after a mask's end are not allowed.
    reshaped = torch.tensor([1, 3], device=DEVICE), noise(2, 21, seed=4)
    masks = torch.tensor([[0xF0, 0x0F, 0xFF], [0x01, 0x00, 0x00], [0x5A, 0xA5, 0x1F]], dtype=torch.uint8, device=DEVICE)
    filters = (
        torch.tensor([EVERY, 4, EVERY, EVERY, 1], device=DEVICE),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0], dtype=torch.float64, device=DEVICE),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0], device=DEVICE),
    )
    heat, seeds, positions = temperatures(count), *(torch.arange(count, device=DEVICE) * n for n in (1, 7))
    for width in (3, 2):
        allowed = torch.tensor([3, 0, 4], device=DEVICE), masks[:, :width].contiguous()
        ids, logprobs, chances = triton_sampling.draw(logits, heat, (seeds, positions), filters, reshaped, allowed)
        settings = sampling.RowSettings(heat, seeds, *filters)
        expected = sampling.reference_draw(logits, settings, positions, reshaped, allowed)
        assert ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(logprobs, expected.logprobs)
        torch.testing.assert_close(chances, expected.chances)
        for row, mask in zip(allowed[0].tolist(), allowed[1].tolist(), strict=True):
            assert int(ids[row]) < 8 * width and mask[int(ids[row]) // 8] >> int(ids[row]) % 8 & 1
    assert int(ids[0]) == 0 and float(chances[0]) == 1.0  # the one token that its mask allows
    assert torch.equal(logits, before)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_and_its_norm_have_the_bits_of_two_launches(dtype: torch.dtype, rule: NormRule) -> None:
    left, right, weight = noise(3, 5, 100, dtype=dtype), noise(3, 5, 100, dtype=dtype, seed=2), noise(100, dtype=dtype)
    arguments = (weight, rule.eps, rule.weight_offset, rule.round_first)
    total, normed = triton_rms_norm.forward_of_sum(left, right, *arguments)
    assert torch.equal(total, left + right)
    assert torch.equal(normed, triton_rms_norm.forward(left + right, *arguments))
    alone = triton_rms_norm.forward_of_sum(left[1, 2:3], right[1, 2:3], *arguments)
    assert torch.equal(alone[0], total[1, 2:3]) and torch.equal(alone[1], normed[1, 2:3])


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


VOCAB_SIZE = 151_936
COMPANIES = [slice(0, 1), slice(17, 18), slice(3, 40)]  # batches taken from 64 rows


def at_an_odd_address(rows: torch.Tensor) -> torch.Tensor:
    """Copy the values into rows of an odd stride."""
    return torch.cat([rows[:, :1], rows], dim=-1)[:, 1:]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 1000, 4096, 8192])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_norms_are_those_of_the_reference(dtype: torch.dtype, rule: NormRule, width: int) -> None:
    x, weight, grad = noise(2000, width, dtype=dtype), noise(width, dtype=dtype, seed=1), noise(2000, width, seed=2)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = rms_norm(*leaves, rule)
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, reference_rms_norm(x, weight, rule), **close)
    for rows in (slice(0, 1), slice(999, 1000), slice(3, 130)):
        assert torch.equal(rms_norm(x[rows], weight, rule), out[rows])
        assert torch.equal(rms_norm(at_an_odd_address(x)[rows], weight, rule), out[rows])
    out.backward(grad.to(dtype))
    wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
    normed = wide[0] * torch.rsqrt(wide[0].pow(2).mean(-1, keepdim=True) + rule.eps)
    (normed * (wide[1] + rule.weight_offset)).backward(grad.to(dtype).double())
    for mine, exact in zip(leaves, wide, strict=True):
        error = (mine.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
        assert float(error) < (1e-5 if dtype == torch.float32 else 1e-2)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_logprobs_are_those_of_the_reference(dtype: torch.dtype) -> None:
    logits, heat, grad = noise(64, VOCAB_SIZE, dtype=dtype), temperatures(64), noise(64, seed=1)
    ids = torch.arange(64, device=DEVICE) * 2300
    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    out = selected_logprobs(leaf, ids, heat)
    expected = torch.log_softmax(wide / heat.double().unsqueeze(-1), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)
    everything = sampling.scaled_logprobs(logits, heat)
    assert torch.equal(everything.gather(-1, ids.unsqueeze(-1)).squeeze(-1), out)
    for rows in COMPANIES:
        for place in (logits[rows], at_an_odd_address(logits)[rows]):
            assert torch.equal(selected_logprobs(place, ids[rows], heat[rows]), out[rows])
    out.backward(grad)
    expected.backward(grad.double())
    close = 2e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=close, atol=close)


def real_settings() -> tuple[torch.Tensor, sampling.RowSettings, torch.Tensor]:
    """Build logits [66, V], settings with each filter in turn, and positions."""
    count = len(SETTINGS) * 11
    top_k, top_p, min_p = (torch.tensor(limit, device=DEVICE) for limit in zip(*SETTINGS * 11, strict=True))
    numbers = torch.arange(count, device=DEVICE)
    settings = sampling.RowSettings(temperatures(count), numbers, top_k, top_p.double(), min_p)
    return noise(count, VOCAB_SIZE), settings, numbers * 5


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_draws_are_those_of_the_reference(dtype: torch.dtype) -> None:
    logits, settings, positions = real_settings()
    logits = logits.to(dtype)
    drawn = sampling.draw_tokens(logits, settings, positions)
    expected = sampling.reference_draw(logits, settings, positions)
    assert torch.equal(drawn.token_ids, expected.token_ids)
    torch.testing.assert_close(drawn.chances, expected.chances, rtol=1e-4, atol=1e-9)
    assert torch.equal(drawn.logprobs, selected_logprobs(logits, drawn.token_ids, settings.temperatures))
    for rows in COMPANIES:
        fields = {name: getattr(settings, name)[rows] for name in vars(settings)}
        for place in (logits[rows], at_an_odd_address(logits)[rows]):
            alone = sampling.draw_tokens(place, sampling.RowSettings(**fields), positions[rows])
            for name in ("token_ids", "logprobs", "chances"):
                assert torch.equal(getattr(alone, name), getattr(drawn, name)[rows]), (rows, name)


@gpu
@pytest.mark.gpu
def test_a_captured_graph_replays_draws_with_settings_changed_in_place() -> None:
    logits, settings, positions = real_settings()
    expected = sampling.draw_tokens(logits, settings, positions)
    graph, places = torch.cuda.CUDAGraph(), torch.zeros_like(positions)
    with torch.cuda.graph(graph):
        drawn = sampling.draw_tokens(logits, settings, places)
    places.copy_(positions)
    graph.replay()
    for name in ("token_ids", "logprobs", "chances"):
        assert torch.equal(getattr(drawn, name), getattr(expected, name)), name
