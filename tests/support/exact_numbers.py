"""Gradients of a module in float64 throughout: what those in float32 and bfloat16 are measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Compute in float64 where code asks for float32, as the layers of transformers do for norms and states."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        named: Mapping[str, Any] = kwargs or {}
        return func(*map(_widened, args), **{name: _widened(value) for name, value in named.items()})


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the length of the difference by the length of `expected`."""
    return float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-12))
