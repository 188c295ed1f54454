"""Rows of an embedding table, whose gradient on a GPU has the same bits in every run.

PyTorch's own gradient of float32 embeddings on an H100 (2.11) differed from run to run for more than 3,072 tokens; an
index_put that accumulates sorts its indices and adds the rows of each one in their order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Look up the rows of weight [V,D] for ids [...] -> [...,D]. The arguments are those of `F.embedding`."""
    is_plain = max_norm is None and not scale_grad_by_freq and not sparse
    if not (is_plain and weight.dtype in (torch.float32, torch.float64) and weight.requires_grad):
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    found: Tensor = _Embedding.apply(input, weight, padding_idx)
    return found


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        grad = grad_out.new_zeros(ctx.shape)
        grad.index_put_((ids.reshape(-1),), grad_out.reshape(-1, ctx.shape[1]), accumulate=True)
        if ctx.padding_idx is not None:
            grad[ctx.padding_idx] = 0.0
        return None, grad, None
