"""Tests of the gradients of attention in Triton, interpreted without a GPU: those of the definition, in double."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lockstep.kernels.attention.packed import varlen_attention
from lockstep.kernels.attention.shared_rows import SharedRows
from lockstep.kernels.attention.step import RowLayout
from lockstep.kernels.attention.triton_gradients import triton_gradients
from lockstep.tests.kernels.attention.test_triton_kernels import DEVICE, KINDS, Packed, gpu, int32, packed

CASES = [([2, 0, 41, 1], (4, 2), (16, 12)), ([70], (3, 1), (24, 24)), ([5, 33], (2, 2), (40, 16))]
BARS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest gradient


def found_gradients(case: Packed, grad_out: Tensor) -> list[Tensor | None]:
    inputs = (case.query, case.key, case.value, *case.terms(), RowLayout(int32(case.starts), None, None))
    return triton_gradients(*inputs, case.rule, case.attend(), grad_out)


def exact_gradients(case: Packed, grad_out: Tensor) -> list[Tensor]:
    given = {name: case.options[name] for name in ("sinks", "bias") if name in case.options}
    leaves = [t.double().requires_grad_() for t in (case.query, case.key, case.value, *given.values())]
    own = dict(zip(given, leaves[3:], strict=True))
    outs = []
    for s, length in enumerate(case.lengths):
        rows = slice(case.starts[s], case.starts[s] + length)
        its = {name: leaf[rows] if leaf.dim() > 1 else leaf for name, leaf in own.items()}
        if length:
            outs.append(_attention(*(leaf[rows] for leaf in leaves[:3]), {**case.options, **its}))
    torch.cat(outs).backward(grad_out.double())
    return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


def _attention(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """Compute the definition in double: `reference_attention` computes in float32."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = torch.einsum("thd,lhd->htl", query, key) * options["scale"]
    if (cap := options.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    position = torch.arange(len(query), device=query.device)
    hidden = position[None] > position[:, None]
    if (window := options.get("window")) is not None:
        hidden = hidden | (position[None] <= position[:, None] - window)
    if (bias := options.get("bias")) is not None:
        distance = (position[:, None] - position).expand_as(scores)
        near = bias.transpose(0, 1).gather(2, distance.clamp(0, bias.shape[2] - 1))
        scores = scores + near.masked_fill(distance >= bias.shape[2], 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat([scores, sinks.expand(len(query), -1).t()[:, :, None]], dim=-1)
    return torch.einsum("htl,lhe->the", torch.softmax(scores, dim=-1)[..., : len(query)], value)


def check(case: Packed, dtype: torch.dtype) -> None:
    grad_out = torch.randn(len(case.query), *case.query.shape[1:2], case.value.shape[-1]).to(DEVICE, dtype)
    found, exact = found_gradients(case, grad_out), exact_gradients(case, grad_out)
    assert [found[i] is None for i in (3, 4)] == [name not in case.options for name in ("sinks", "bias")]
    for mine, theirs in zip([each for each in found if each is not None], exact, strict=True):
        assert mine.shape == theirs.shape
        error = (mine.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
        assert float(error) < BARS[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "heads", "widths"), CASES)
def test_gradients_are_those_of_the_definition_in_double(
    lengths: list[int], heads: tuple[int, int], widths: tuple[int, int], kind: str
) -> None:
    check(packed(lengths, heads, widths, torch.float32, kind), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precisions_are_near_the_exact_ones(dtype: torch.dtype) -> None:
    check(packed([70, 9], (4, 2), (32, 32), dtype, "all"), dtype)


def test_a_sequence_has_its_gradients_whatever_is_packed_with_it() -> None:
    case = packed([13, 40, 7], (4, 2), (16, 16), torch.float32, "all")
    grad_out = torch.randn(60, 4, 16, device=DEVICE)
    together = found_gradients(case, grad_out)
    rows = slice(13, 53)
    own = {**case.options, **dict(zip(("sinks", "bias"), case.terms(rows), strict=True))}
    alone = Packed([40], case.query[rows], case.key[rows], case.value[rows], own)
    for one, all_of_them in zip(found_gradients(alone, grad_out[rows])[:3], together[:3], strict=True):
        torch.testing.assert_close(one, all_of_them[rows], rtol=0, atol=1e-6)
    again = found_gradients(case, grad_out)
    assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))


def test_a_bias_of_all_rows_gives_the_bits_of_one_of_each_row() -> None:
    case = packed([13, 40, 7], (4, 2), (16, 16), torch.float32, "all")
    shared, grad_out = torch.randn(4, 45, device=DEVICE), torch.randn(60, 4, 16, device=DEVICE)
    ways = [{**case.options, "bias": bias} for bias in (shared, shared.expand(60, 4, 45).contiguous())]
    found = []
    for way in ways:
        inputs = (case.query, case.key, case.value, int32(case.starts))
        leaves = [t.clone().requires_grad_() for t in inputs[:3]]
        out = varlen_attention(*leaves, inputs[3], path="triton", **way)
        out.backward(grad_out)
        found.append([out, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_shared_rows_have_the_bits_and_summed_gradients_of_whole_sequences(kind: str) -> None:
    case = packed([20], (4, 2), (16, 12), torch.float32, kind)
    shared = SharedRows.of([[*range(14), 14, 15], [*range(14), 16], [17, 18, 19], [*range(9)]], DEVICE)
    inputs = [case.query, case.key, case.value, *(each for each in case.terms() if each is not None)]
    names = [name for name in ("sinks", "bias") if name in case.options]

    def attend(leaves: list[Tensor], **others: Any) -> Tensor:
        own = {**case.options, **dict(zip(names, leaves[3:], strict=True))}
        return varlen_attention(*leaves[:3], shared.starts, path="triton", **own, **others)

    leaves, others = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    out = attend(leaves, shared=shared)
    whole = attend([leaf[shared.row_of] if len(leaf) == 20 else leaf for leaf in others])
    assert torch.equal(whole, out[shared.row_of])
    upstream = torch.randn(out.shape, device=DEVICE)
    out.backward(upstream)
    whole.backward(shared.spread_gradient(upstream))
    for mine, its in zip(leaves, others, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, atol=1e-5, rtol=1e-4)


def test_the_trainers_attention_takes_these_gradients_and_reads_nothing_on_the_host(monkeypatch) -> None:
    monkeypatch.setattr("lockstep.kernels.attention.packed.padded_gradients", None)
    case = packed([3, 20], (4, 2), (16, 16), torch.float32)
    leaves = [t.clone().requires_grad_() for t in (case.query, case.key, case.value)]
    out = varlen_attention(*leaves, int32(case.starts), path="triton", **case.options)
    assert torch.equal(out, case.attend())
    out.sum().backward()
    expected = exact_gradients(case, torch.ones_like(out))
    for leaf, exact in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, exact.float(), rtol=1e-4, atol=1e-5)


def test_what_is_not_served_is_refused() -> None:
    case = packed([3], (1, 1), (16, 16), torch.float64)
    layout = RowLayout(int32([0, 3]), None, None)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        triton_gradients(case.query, case.key, case.value, None, None, layout, case.rule, case.query, case.query)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (80, 80)])
def test_compiled_gradients_are_those_of_the_definition(dtype: torch.dtype, kind: str, widths: tuple[int, int]) -> None:
    check(packed([1, 700, 33, 300], (8, 2), widths, dtype, kind), dtype)
