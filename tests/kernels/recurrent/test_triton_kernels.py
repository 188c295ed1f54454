"""Tests of the Triton recurrences, interpreted without a GPU: the reference's values; the same bits for any cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lockstep.kernels.recurrent import triton_kernels
from lockstep.kernels.recurrent.conv import reference_causal_conv
from lockstep.kernels.recurrent.delta_rule import DeltaRule, reference_gated_delta_rule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = [1, 9, 0, 4]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_has_the_references_values_and_the_same_bits_for_any_cut(activation: str | None) -> None:
    x, weight, bias, initial = randn(14, 70), randn(70, 4), randn(70), randn(4, 3, 70)
    out, final = triton_kernels.causal_conv(x, weight, bias, initial, starts(LENGTHS), activation)
    expected, end = reference_causal_conv(x, weight, bias, initial, starts(LENGTHS), activation)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(final, end)
    first, state = triton_kernels.causal_conv(x[1:7], weight, bias, initial[1:2], starts([6]), activation)
    second, last = triton_kernels.causal_conv(x[7:10], weight, bias, state, starts([3]), activation)
    assert torch.equal(torch.cat([first, second]), out[1:10])
    assert torch.equal(last[0], final[1])


@pytest.mark.parametrize(
    ("decays", "corrects"), [("head", True), ("channel", True), ("head", False), ("element", False)]
)
def test_delta_rule_has_the_references_values_and_the_same_bits_for_any_cut(decays: str, corrects: bool) -> None:
    keys, by_element = 4 if decays == "channel" else 2, decays == "element"
    q, k, v = randn(14, keys, 20), randn(14, keys, 20), randn(14, 4, 40)
    beta, initial = torch.rand((14, 4, 40) if by_element else (14, 4), device=DEVICE), randn(4, 4, 20, 40)
    g = -torch.rand({"head": (14, 4), "channel": (14, 4, 20), "element": (4, 20, 40)}[decays], device=DEVICE)
    rule = DeltaRule(20**-0.5, 1e-6 if corrects else None, corrects)

    def run(rows: slice, state: Tensor | None, lengths: list[int]) -> tuple[Tensor, Tensor]:
        tensors = [*(t[rows] for t in (q, k, v)), g if by_element else g[rows], beta[rows]]
        options = (rule.scale, rule.norm_eps, rule.corrects)
        return triton_kernels.gated_delta_rule(*tensors, state, starts(lengths), *options)

    out, final = run(slice(None), initial, LENGTHS)
    expected = reference_gated_delta_rule(q, k, v, g, beta, initial, starts(LENGTHS), rule)
    for found, other in zip((out, final), expected, strict=True):
        torch.testing.assert_close(found, other, atol=1e-5, rtol=1e-5)
    first, state = run(slice(1, 7), initial[1:2], [6])
    second, last = run(slice(7, 10), state, [3])
    assert torch.equal(torch.cat([first, second]), out[1:10])
    assert torch.equal(last[0], final[1])
    alone, zeros = run(slice(10, 14), None, [4]), run(slice(10, 14), torch.zeros_like(initial[:1]), [4])
    assert all(map(torch.equal, alone, zeros))
