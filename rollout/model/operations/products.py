"""Matrix products that a module's own code writes by hand, computed by the invariant product of linear layers.

Letters: M rows of the left operand, K contracted, N columns of the right operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....kernels.layers.powers import reduction

Linear = Callable[..., Tensor]  # x [...,K], weight [N,K], bias [N] or None -> [...,N]

_DTYPES = (torch.float32, torch.bfloat16)
# Products over few numbers are added one after the other, for any number of batches at once: over so many for any
# number of columns, and for few columns over more. Each number reads and writes the result, which columns make large.
_NARROW, _FEW_COLUMNS = 8, 16


def replaced_products(linear: Linear) -> dict[Callable[..., object], Callable[..., object]]:
    """Return a table of torch's matrix products and their replacements by `linear`."""

    def matmul(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is not None or not _serves(left, right):
            return torch.matmul(left, right) if out is None else torch.matmul(left, right, out=out)
        return invariant_matmul(left, right, linear)

    def addmm(
        bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        if not _serves(left, right) or beta != 1 or alpha != 1 or bias.dtype is not left.dtype or out is not None:
            return torch.addmm(bias, left, right, beta=beta, alpha=alpha, out=out)
        if bias.shape == right.shape[1:]:
            return linear(left, right.t(), bias)
        return invariant_matmul(left, right, linear) + bias

    def baddbmm(
        bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        if not _serves(left, right) or beta != 1 or alpha != 1 or out is not None:
            return torch.baddbmm(bias, left, right, beta=beta, alpha=alpha, out=out)
        return invariant_matmul(left, right, linear) + bias

    def einsum(equation: str, *operands: Tensor) -> Tensor:
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        if len(operands) != 2 or not _serves(*operands) or (parts := _einsum_parts(equation)) is None:
            return torch.einsum(equation, *operands)
        return _einsum(*parts, *operands, linear)

    products = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)
    others = (torch.linalg.matmul, torch.mv, Tensor.mv)
    return {
        F.linear: linear,
        **dict.fromkeys((*products, *others), matmul),
        **dict.fromkeys((torch.addmm, Tensor.addmm), addmm),
        **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), baddbmm),
        torch.einsum: einsum,
        Tensor.__rmatmul__: lambda right, left: matmul(left, right),
        **_rare_products(linear),
    }


def _rare_products(linear: Linear) -> dict[Callable[..., object], Callable[..., object]]:
    """Return the part of the table with functions that few modules call."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        return invariant_matmul(left, right, linear) if _serves(left, right) else torch.matmul(left, right)

    def addmv(
        bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
    ) -> Tensor:
        if not _serves(left, right) or beta != 1 or alpha != 1 or out is not None:
            return torch.addmv(bias, left, right, beta=beta, alpha=alpha, out=out)
        return invariant_matmul(left, right, linear) + bias

    def inner(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is not None or not left.dim() or not right.dim() or not _serves(left, right):
            return torch.inner(left, right, out=out)
        found = invariant_matmul(left, right.reshape(-1, right.shape[-1]).t(), linear)
        return found.reshape(*left.shape[:-1], *right.shape[:-1])

    def tensordot(left: Tensor, right: Tensor, dims: Any = 2, out: Tensor | None = None) -> Tensor:
        if out is not None or isinstance(dims, Tensor) or not left.numel() or not right.numel():
            return torch.tensordot(left, right, dims, out=out)
        if isinstance(dims, int):
            dims = range(left.dim() - dims, left.dim()), range(dims)
        ours, theirs = ([dim % x.dim() for dim in its] for x, its in zip((left, right), dims, strict=True))
        rows, columns = ([x.shape[dim] for dim in range(x.dim()) if dim not in its] for x, its in
                         ((left, ours), (right, theirs)))  # fmt: skip
        x = left.movedim(ours, list(range(-len(ours), 0))).reshape(math.prod(rows), -1)
        y = right.movedim(theirs, list(range(len(theirs)))).reshape(-1, math.prod(columns))
        return product(x, y).reshape([*rows, *columns])

    def bilinear(left: Tensor, right: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _serves(left, weight):
            return F.bilinear(left, right, weight, bias)
        columns = weight.transpose(0, 1).flatten(1)  # [K of left, N * K of right]
        halves = invariant_matmul(left, columns, linear).unflatten(-1, (len(weight), -1))
        total = reduction(torch.sum)(halves * right.unsqueeze(-2), -1)
        return total if bias is None else total + bias

    def multi_dot(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        return reduce(product, tensors) if out is None else torch.linalg.multi_dot(tensors, out=out)

    return {
        **dict.fromkeys((torch.addmv, Tensor.addmv), addmv),
        **dict.fromkeys((torch.inner, Tensor.inner), inner),
        torch.tensordot: tensordot,
        torch.linalg.multi_dot: multi_dot,
        F.bilinear: bilinear,
        torch.cdist: cdist,
    }


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Compute the distances of all pairs, as torch.cdist does, but none by a matrix product."""
    return torch.cdist(x1, x2, p, "donot_use_mm_for_euclid_dist")


def invariant_matmul(left: Tensor, right: Tensor, linear: Linear) -> Tensor:
    """Compute torch.matmul(left, right), differentiable; the bits of a row depend on the row and on `right` alone, and
    those of a column, where `left` is a parameter and `right` a batch, on the column and on `left` alone."""
    if left.dim() == 1:
        return invariant_matmul(left[None], right, linear).squeeze(-1 if right.dim() == 1 else -2)
    if right.dim() == 1:
        return linear(left, right[None]).squeeze(-1)
    if right.dim() == 2:
        return linear(left, right.t())
    if left.dim() == 2 and _is_weight(left):  # before columns, which are the rows here (Mamba)
        return linear(right.mT, left).mT
    if _is_weight(left) and not _is_weight(right):  # one for each head (Zamba)
        return invariant_matmul(right.mT, left.mT, linear).mT
    if left.shape[-1] <= (_NARROW if right.shape[-1] > _FEW_COLUMNS else _FEW_COLUMNS):
        total = left[..., :1] * right[..., :1, :]
        for k in range(1, left.shape[-1]):
            total = total + left[..., k : k + 1] * right[..., k : k + 1, :]
        return total
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts = left.expand(*batch, *left.shape[-2:]).flatten(0, -3).unbind()
    weights = right.expand(*batch, *right.shape[-2:]).flatten(0, -3).mT.contiguous().unbind()
    products = [linear(rows, weight) for rows, weight in zip(lefts, weights, strict=True)]
    return torch.stack(products).view(*batch, left.shape[-2], right.shape[-1])


def _is_weight(x: Tensor) -> bool:
    """Return whether it is a parameter, or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def _serves(left: Tensor, right: Tensor) -> bool:
    """Return whether to replace the product: not over a single number (rotary angles), which is exact anyway."""
    return left.dtype is right.dtype and left.dtype in _DTYPES and left.shape[-1] > 1 and left.numel() > 0


def _einsum_parts(equation: str) -> tuple[str, str, str] | None:
    """Return the letters of two operands and of the result; None for an equation of another kind."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    letters = left + right + out
    is_plain = bool(arrow and comma) and letters.isalpha() and all(len(set(p)) == len(p) for p in (left, right, out))
    # Every letter stands twice: in one operand alone it would be summed there.
    return (left, right, out) if is_plain and all(letters.count(letter) >= 2 for letter in letters) else None


def _einsum(left: str, right: str, out: str, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
    sizes = dict(zip(left + right, (*x.shape, *y.shape), strict=True))
    batch = [c for c in left if c in right and c in out]
    summed = [c for c in left if c in right and c not in out]
    rows, columns = ([c for c in operand if c not in batch + summed] for operand in (left, right))

    def shape(letters: list[str]) -> list[int]:
        return [sizes[c] for c in letters]

    def volume(letters: list[str]) -> int:
        return math.prod(shape(letters))

    x = x.permute([left.index(c) for c in batch + rows + summed]).reshape(*shape(batch), volume(rows), volume(summed))
    y = y.permute([right.index(c) for c in batch + summed + columns])
    y = y.reshape(*shape(batch), volume(summed), volume(columns))
    product = invariant_matmul(x, y, linear).view(shape(batch + rows + columns))
    return product.permute([(batch + rows + columns).index(c) for c in out])
