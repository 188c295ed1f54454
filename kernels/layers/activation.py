"""Activations in which each element of the result depends on one element of the input alone.

In fp32, PyTorch's own silu, sigmoid and gelu compute the last few elements of a tensor (those that do not fill a
vector, in each thread) with another routine than the rest, and so do softplus, mish, elu, celu, selu and glu;
measurements found no such difference in exp, expm1, log, log1p, tanh, erf, cos, powers 2, 3, 0.5 and -1, and the basic
operations; for other powers see `powers.py`. In half precisions silu and sigmoid showed no
difference either, so PyTorch's own are used there; both gelus and rsqrt did, so they are computed in fp32 and rounded.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
CUBIC = 0.044715  # of the tanh approximation of gelu (Hendrycks & Gimpel 2016)


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)), any shape, differentiable once."""
    return _apply(_sigmoid, _sigmoid_slope, x) if _by_hand(x) else torch.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """Compute x * sigmoid(x), any shape, differentiable once."""
    return _apply(_silu, _silu_slope, x) if _by_hand(x) else F.silu(x)


def gelu(x: Tensor) -> Tensor:
    """Compute x * Phi(x), Phi the normal distribution function, any shape, differentiable once."""
    return _apply(_gelu, _gelu_slope, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute gelu with Phi approximated by tanh (F.gelu, approximate="tanh"), any shape, differentiable once."""
    return _apply(_gelu_tanh, _gelu_tanh_slope, x)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Compute log(1 + exp(beta x)) / beta, any shape, differentiable; x itself where beta x exceeds the threshold."""
    wide = x if _by_hand(x) else x.float()
    scaled = wide * beta
    return torch.where(scaled > threshold, wide, _apply(_softplus, _sigmoid, scaled) / beta).to(x.dtype)


def mish(x: Tensor) -> Tensor:
    """Compute x * tanh(softplus(x)), any shape, differentiable."""
    wide = x if _by_hand(x) else x.float()
    return (wide * torch.tanh(softplus(wide))).to(x.dtype)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Compute x where it is positive, else alpha * (exp(x) - 1), any shape, differentiable; at 0 with slope alpha."""
    is_positive = x > 0
    return torch.where(is_positive, x, alpha * torch.expm1(torch.where(is_positive, 0.0, x)))


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Compute x where it is positive, else alpha * (exp(x / alpha) - 1), any shape, differentiable."""
    is_positive = x > 0
    return torch.where(is_positive, x, alpha * torch.expm1(torch.where(is_positive, 0.0, x) / alpha))


def selu(x: Tensor) -> Tensor:
    """Compute elu with the constants of Klambauer et al. 2017, any shape, differentiable."""
    return SELU_SCALE * elu(x, SELU_ALPHA)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """Compute the first half along a dimension times the sigmoid of the second, differentiable once."""
    first, second = x.chunk(2, dim)
    return first * sigmoid(second)


def rsqrt(x: Tensor) -> Tensor:
    """Compute 1 / sqrt(x), any shape, differentiable; half precisions in fp32 and rounded."""
    return torch.rsqrt(x) if _by_hand(x) else torch.rsqrt(x.float()).to(x.dtype)


def _by_hand(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)


class _Elementwise(torch.autograd.Function):
    """A function and its slope, in fp32 or wider. The slope is written by hand: autograd's formula gives inf / inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return _widened(function, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        wide = x if _by_hand(x) else x.float()
        return (grad_out * ctx.slope(wide)).to(x.dtype), None, None


def _apply(function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _Elementwise.apply(x, function, slope)
    return _widened(function, x)


def _widened(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x) if _by_hand(x) else function(x.float()).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1).reciprocal_()


def _sigmoid_slope(x: Tensor) -> Tensor:
    s = _sigmoid(x)
    return s * (1 - s)


def _softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())).add_(x.clamp(min=0))


def _silu(x: Tensor) -> Tensor:
    return x / torch.exp(-x).add_(1)


def _silu_slope(x: Tensor) -> Tensor:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu(x: Tensor) -> Tensor:
    return x * (0.5 * (1 + torch.erf(x * math.sqrt(0.5))))


def _gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x.clamp(-30, 30) * density


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * (0.5 * (1 + torch.tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x))))


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    near = x.clamp(-30, 30)  # beyond: tanh is exactly 1, its slope 0, and x squared may overflow
    t = torch.tanh(SQRT_2_OVER_PI * (near + CUBIC * near * near * near))
    inner = SQRT_2_OVER_PI * (1 + 3 * CUBIC * near * near)
    return 0.5 * (1 + t) + 0.5 * near * (1 - t * t) * inner
