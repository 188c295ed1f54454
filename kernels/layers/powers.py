"""Powers and other functions of which PyTorch computes the last few elements of a tensor, in each thread, with another
routine than the rest, and sums to one number, which it divides among threads.

On a CPU in fp32: powers with exponents other than those of `_EXACT`, and of numbers to tensors, exp2, sinh, cosh,
atanh, atan2, logaddexp. They are composed here of functions in which no element depends on its place (see
`activation.py`), in fp64 and rounded, so that a result is as near as PyTorch's. In half precisions only the power -0.5
showed a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .activation import rsqrt

_EXACT = frozenset({-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0})  # exponents that PyTorch computes by basic operations
_ONE_THREAD = 32768  # fewer numbers are summed by one thread


def power(x: Tensor | float, exponent: Tensor | float) -> Tensor:
    """Compute x to a power, as torch.pow with the same operands, differentiable once."""
    is_half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    if isinstance(x, Tensor) and not isinstance(exponent, Tensor) and (is_half or exponent in _EXACT):
        return rsqrt(x) if is_half and exponent == -0.5 else torch.pow(x, exponent)
    return _composed(_power, torch.pow, x, exponent)


def exp2(x: Tensor) -> Tensor:
    """Compute 2 to the power of x, any shape, differentiable once."""
    return _composed(lambda x: torch.exp(x * math.log(2)), torch.exp2, x)


def sinh(x: Tensor) -> Tensor:
    """Compute the hyperbolic sine, any shape, differentiable once."""

    def compose(x: Tensor) -> Tensor:
        grown = torch.expm1(x.abs())
        return torch.copysign(0.5 * (grown + grown / (grown + 1)), x)

    return _composed(compose, torch.sinh, x)


def cosh(x: Tensor) -> Tensor:
    """Compute the hyperbolic cosine, any shape, differentiable once."""

    def compose(x: Tensor) -> Tensor:
        grown = torch.exp(x.abs())
        return 0.5 * (grown + 1 / grown)

    return _composed(compose, torch.cosh, x)


def atanh(x: Tensor) -> Tensor:
    """Compute the inverse hyperbolic tangent, any shape, differentiable once."""
    return _composed(lambda x: 0.5 * torch.log1p(2 * x.abs() / (1 - x.abs())), torch.atanh, x)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Compute the angle of the points (x, y), differentiable once."""

    def compose(y: Tensor, x: Tensor) -> Tensor:
        angle = torch.atan(y / x)
        return torch.where(x < 0, angle + torch.copysign(torch.full_like(angle, math.pi), y), angle)

    return _composed(compose, torch.atan2, y, x)


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """Compute log(exp(x) + exp(y)), differentiable once."""
    return _composed(
        lambda x, y: torch.maximum(x, y) + torch.log1p(torch.exp(-(x - y).abs())), torch.logaddexp, x, y
    )  # fmt: skip


def reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a sum or mean whose threads do not share the numbers of one result: PyTorch's share them where there is
    one result alone, so a row by itself would have other bits than in a batch."""

    def run(x: Tensor, *args: Any, **named: Any) -> Any:
        result = function(x, *args, **named)
        if x.numel() < _ONE_THREAD or result.numel() != 1 or x.device.type != "cpu" or "out" in named:
            return result
        dtype = result.dtype if x.dtype != result.dtype else None
        every = list(range(1, x.dim() + 1))  # those that were not reduced have one number each
        return function(torch.stack([x, x]), every, dtype=dtype)[0].reshape(result.shape)

    return run


def _power(x: Tensor, exponent: Tensor) -> Tensor:
    return torch.exp(torch.log(x.abs()) * exponent)


def _composed(compose: Callable[..., Tensor], own: Callable[..., Tensor], *operands: Tensor | float) -> Tensor:
    """Compute a function of PyTorch's, `own`, by `compose`, which takes the operands in fp64. Zeros, infinities, NaN
    and signs are PyTorch's own, which depend on no place."""
    tensors = [one for one in operands if isinstance(one, Tensor)]
    if torch.result_type(*_two(operands)) != torch.float32 or any(one.device.type != "cpu" for one in tensors):
        return own(*operands)
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return _Composed.apply(compose, own, *operands)
    return _values(compose, own, operands)


def _two(operands: Sequence[Tensor | float]) -> Sequence[Any]:
    return operands if len(operands) == 2 else (operands[0], operands[0])


def _values(compose: Callable[..., Tensor], own: Callable[..., Tensor], operands: Sequence[Tensor | float]) -> Tensor:
    plain = own(*operands)
    wide = [one.double() if isinstance(one, Tensor) else one for one in operands]
    if not isinstance(wide[0], Tensor):  # a number to a tensor
        wide[0] = torch.tensor(wide[0], dtype=torch.float64)
    found = compose(*wide).to(plain.dtype)
    is_regular = plain.isfinite() & (plain != 0) & found.isfinite()
    return torch.where(is_regular, torch.copysign(found, plain), plain)


class _Composed(torch.autograd.Function):
    """A composed function with the slope of PyTorch's own."""

    @staticmethod
    def forward(ctx: Any, compose: Callable[..., Tensor], own: Callable[..., Tensor], *operands: Any) -> Tensor:
        ctx.own, ctx.numbers = own, [None if isinstance(one, Tensor) else one for one in operands]
        ctx.save_for_backward(*(one for one in operands if isinstance(one, Tensor)))
        return _values(compose, own, operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        needs = ctx.needs_input_grad[2:]
        operands = [
            next(saved).detach().requires_grad_(need) if number is None else number
            for number, need in zip(ctx.numbers, needs, strict=True)
        ]
        asked = [one for one, need in zip(operands, needs, strict=True) if need]
        with torch.enable_grad():
            grads = iter(torch.autograd.grad(ctx.own(*operands), asked, grad_out))
        return None, None, *(next(grads) if need else None for need in needs)
