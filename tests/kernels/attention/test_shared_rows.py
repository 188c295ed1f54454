"""Attention of sequences that have rows in common: the bits of whole sequences, and the sums of their gradients."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.attention.packed import varlen_attention
from lockstep.kernels.attention.paged import attention_path
from lockstep.kernels.attention.shared_rows import SharedRows

PROMPT = range(37)
# Three answers to a prompt, two of which begin alike; one that is another's beginning; and one with nothing in common.
SEQUENCES = [
    [*PROMPT, 37, 38, 39], [*PROMPT, 37, 40], [*PROMPT, 41, 42, 43, 44], [*PROMPT, 41], [45, 46, 47]
]  # fmt: skip
NUM_ROWS, HEADS, KV_HEADS, WIDTH = 48, 4, 2, 16
PATHS = sorted({"torch", attention_path(torch.device("cpu"), torch.float32)})
RULES = {
    "plain": {},
    "window and softcap": {"window": 9, "softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
    "sinks of rows": {"sinks": torch.linspace(-1, 1, NUM_ROWS * HEADS).view(NUM_ROWS, HEADS)},
    "bias of rows": {"bias": torch.linspace(-1, 1, NUM_ROWS * HEADS * 5).view(NUM_ROWS, HEADS, 5)},
}


def rows_of(width: int, heads: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(NUM_ROWS, heads, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_rows_have_the_bits_of_whole_sequences_and_their_summed_gradients(rule, dtype, path):
    shared = SharedRows.of(SEQUENCES, torch.device("cpu"))
    tensors = [rows_of(WIDTH, heads, seed, dtype) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    options = dict(RULES[rule])
    if "bias" in options:
        options["bias"] = options["bias"].to(dtype)
    given = {name: value.clone().requires_grad_() for name, value in options.items() if isinstance(value, torch.Tensor)}
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = varlen_attention(*leaves, shared.starts, scale=0.25, shared=shared, path=path, **{**options, **given})

    def spread(tensor):
        return tensor[shared.row_of] if tensor.shape[0] == NUM_ROWS else tensor

    others = [tensor.clone().requires_grad_() for tensor in tensors]
    also = {name: options[name].clone().requires_grad_() for name in given}
    whole = varlen_attention(
        *map(spread, others), shared.starts, scale=0.25, path=path,
        **{**options, **{name: spread(value) for name, value in also.items()}},
    )  # fmt: skip
    assert torch.equal(whole, out[shared.row_of]), "each token of a row has its bits"
    with torch.no_grad():
        assert torch.equal(
            varlen_attention(*tensors, shared.starts, scale=0.25, shared=shared, path=path, **options), out
        )

    upstream = rows_of(WIDTH, HEADS, 7, dtype)
    out.backward(upstream)
    first = torch.zeros(whole.shape, dtype=dtype)
    first[shared.own] = upstream
    whole.backward(first)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for mine, its in zip([*leaves, *given.values()], [*others, *also.values()], strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **close)
    again = [tensor.clone().requires_grad_() for tensor in tensors]
    varlen_attention(*again, shared.starts, scale=0.25, shared=shared, path=path, **options).backward(upstream)
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(leaves, again, strict=True)), "the same each time"


def test_a_row_that_no_row_leads_to_and_another_number_of_rows_are_refused():
    with pytest.raises(ValueError, match="token 2 has row 3, where rows 0 to 2 may come"):
        SharedRows.of([[0, 1], [3]], torch.device("cpu"))
    shared = SharedRows.of([[0, 1], [0]], torch.device("cpu"))
    rows = torch.zeros(3, 1, 16)
    with pytest.raises(ValueError, match="shared has 2 rows, query 3"):
        varlen_attention(rows, rows, rows, shared.starts, scale=1.0, shared=shared)
    ends = torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="row_ends cannot be given with shared"):
        varlen_attention(rows[:2], rows[:2], rows[:2], shared.starts, scale=1.0, shared=shared, row_ends=ends)
