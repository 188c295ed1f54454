"""Scores that an attention's own code asks for: recorded until it multiplies their softmax by values.

Code that does anything else with them is refused: each step has to be one that the hosted attention computes.
Letters: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Forward = Callable[..., Any]


class Attention(Protocol):
    """The attention whose code runs."""

    def window_of(self, mask: Tensor) -> int | None:
        """Return the window of a mask of the attention's own; 0: none. None: it is no mask that is known."""
        ...

    def is_key_bias(self, value: Tensor) -> bool:
        """Return whether a tensor has the form of the numbers that the attention's model adds to the scores of keys."""
        ...

    def attend(self, scores: Scores, value: Tensor) -> Tensor: ...
    def refuse(self, what: str) -> NoReturn: ...


@dataclass(frozen=True)
class Scores:
    """scale * query . key + bias of all rows and keys of a call [..., T, T], masked, or their softmax."""

    attention: Attention
    batch: int
    query: Tensor  # [B, H, T, D] or [B * H, T, D]
    key: Tensor  # of the same number of dimensions; its heads may be fewer
    shape: torch.Size
    dtype: torch.dtype
    scale: float = 1.0
    bias: float = 0.0  # factor of the numbers of keys; 0: they were not added
    window: int = 0  # 0: none
    is_packed: bool = False  # it was masked as a packed row is
    is_softmax: bool = False

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # -- the same numbers in another form ------------------------------------------------------------------------

    def view(self, *shape: Any) -> Scores:
        """Return them with other dimensions of batch and heads."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in sizes:
            known = -torch.Size(sizes).numel()
            sizes[sizes.index(-1)] = self.shape.numel() // max(known, 1)
        if torch.Size(sizes).numel() != self.shape.numel() or tuple(sizes[-2:]) != self.shape[-2:]:
            self.attention.refuse(f"reshapes scores {list(self.shape)} to {sizes}")
        return replace(self, shape=torch.Size(sizes))

    reshape = view

    def to(self, *kinds: Any, **named: Any) -> Scores:
        """Return them in another dtype: the hosted attention has its own."""
        found = [kind for kind in (*kinds, *named.values()) if isinstance(kind, torch.dtype)]
        return replace(self, dtype=found[0]) if found else self

    type = to

    def type_as(self, other: Tensor) -> Scores:
        return replace(self, dtype=other.dtype)

    def float(self) -> Scores:
        return replace(self, dtype=torch.float32)

    def contiguous(self) -> Scores:
        return self

    # -- scores ----------------------------------------------------------------------------------------------------

    def __mul__(self, factor: object) -> Scores:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or self.is_softmax or self.is_packed:
            self.attention.refuse(f"multiplies scores by {_described(factor)}")
        return replace(self, scale=self.scale * factor, bias=self.bias * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Scores:
        if isinstance(divisor, bool) or not isinstance(divisor, int | float) or self.is_softmax or not divisor:
            self.attention.refuse(f"divides scores by {_described(divisor)}")
        return replace(self, scale=self.scale / divisor, bias=self.bias / divisor)

    def __add__(self, other: object) -> Scores:
        """Add a mask, or the numbers of keys."""
        if not isinstance(other, Tensor) or self.is_softmax:
            self.attention.refuse(f"adds {_described(other)} to scores")
        if self.attention.is_key_bias(other):
            if self.bias:
                self.attention.refuse("adds numbers to scores twice")
            return replace(self, bias=1.0)
        return self._masked(other, f"adds {_described(other)} to scores")

    __radd__ = __add__

    def masked_fill(self, mask: Tensor, _: object) -> Scores:
        return self._masked(mask, f"masks scores by {_described(mask)}")

    def _masked(self, mask: Tensor, what: str) -> Scores:
        """Return them masked. A mask of one number is of transformers' functions, and stands for a causal one; an empty
        one for that of a packed row."""
        window = self.attention.window_of(mask)  # first: of one row it has one number, too
        if window is None and mask.numel() == 1:
            return self
        if mask.shape == (1, 1, 1, 0):
            return replace(self, is_packed=True)
        if window is None or (window and self.window):
            self.attention.refuse(what)
        return replace(self, window=window or self.window)

    def softmax(self, dim: int, dtype: torch.dtype | None = None) -> Scores:
        if self.is_softmax or dim % self.dim() != self.dim() - 1:
            self.attention.refuse(f"computes a softmax of scores {list(self.shape)} along dimension {dim}")
        return replace(self, is_softmax=True, dtype=dtype or self.dtype)

    # -- their product with values -----------------------------------------------------------------------------------

    def __matmul__(self, value: Tensor) -> Tensor:
        if not self.is_softmax or not isinstance(value, Tensor):
            self.attention.refuse("multiplies scores by a matrix before their softmax")
        return self.attention.attend(self, value)

    matmul = bmm = __matmul__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.attention.refuse(f"asks scores for {name}")

    def __getitem__(self, index: object) -> NoReturn:
        self.attention.refuse("takes a part of scores")

    # -- functions of torch ------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Forward, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        scores = next(value for value in (*args, *named.values()) if isinstance(value, Scores))
        if (known := _FUNCTIONS.get(func)) is None:
            scores.attention.refuse(f"computes {getattr(func, '__name__', func)} of scores")
        return known(*args, **named)


def _described(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor | Scores) else f"{type(value).__name__} {value}"


def _softmax(input: Scores, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Scores:
    return input.softmax(dim, dtype)


def _dropout(input: Scores, p: float = 0.5, training: bool = True, inplace: bool = False) -> Scores:
    if p and training:
        input.attention.refuse(f"draws random numbers (dropout {p:g})")
    return input


def _where(condition: Tensor, input: object, other: object) -> Scores:
    """Return scores that are kept where a mask is set."""
    if not isinstance(input, Scores) or not isinstance(condition, Tensor):
        assert isinstance(other, Scores)
        other.attention.refuse("keeps scores where a mask is not set")
    return input.masked_fill(condition, other)


def _sum(left: Any, right: Any) -> Any:
    return left + right if isinstance(left, Scores) else right + left


def _product(left: Any, right: Any) -> Any:
    return left * right if isinstance(left, Scores) else right * left


def _matmul(left: Any, right: Any) -> Any:
    if not isinstance(left, Scores):
        right.attention.refuse("multiplies a matrix by scores")
    return left @ right


_FUNCTIONS: dict[Forward, Forward] = {
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax),
    F.dropout: _dropout,
    torch.where: _where,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _sum),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _product),
    **dict.fromkeys((torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__), _matmul),
}
