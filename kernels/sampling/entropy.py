"""The entropy of rows of logits, a few rows in float32 at a time.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .logprobs import per_row, scaled_logprobs

_MAX_WIDENED = 1 << 22  # logits that are widened to float32 at a time


def row_entropy(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Compute the entropy float32 [R], in nats, of softmax(logits / temperature). logits [R, V]; temperature: one, or
    float32 [R]; as in `scaled_logprobs` one under GREEDY_BELOW stands for 1.

    Differentiable once in the logits. The backward pass does nothing where the entropy is in no loss.
    """
    return _RowEntropy.apply(logits, per_row(temperature, logits).expand(len(logits)))


def _blocks(logits: Tensor, temperatures: Tensor) -> Iterator[tuple[slice, Tensor]]:
    count = max(1, _MAX_WIDENED // max(logits.shape[1], 1))
    for start in range(0, len(logits), count):
        rows = slice(start, start + count)
        yield rows, scaled_logprobs(logits[rows], temperatures[rows])


def _weighted(probabilities: Tensor, values: Tensor) -> Tensor:
    """Multiply; a token of the probability 0 adds nothing, whatever its value is."""
    return torch.where(probabilities == 0, 0.0, probabilities * values)


class _RowEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperatures: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        out = logits.new_empty(len(logits), dtype=torch.float32)
        for rows, logprobs in _blocks(logits, temperatures):
            out[rows] = -_weighted(logprobs.exp(), logprobs).sum(-1)
        ctx.save_for_backward(logits, out, temperatures)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        logits, entropy, temperatures = ctx.saved_tensors
        slope = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows, logprobs in _blocks(logits, temperatures):
            factor = grad[rows].unsqueeze(-1) * (logprobs + entropy[rows].unsqueeze(-1))
            factor = factor / temperatures[rows].unsqueeze(-1)
            slope[rows] = -_weighted(logprobs.exp(), factor).to(logits.dtype)
        return slope, None
