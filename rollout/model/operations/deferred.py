"""Tensors of a module's forward whose value is computed when it is read, by one kernel with what follows if possible.

A module's own code adds a residual and then calls a norm, or rotates its queries and keys and then calls the attention.
On a GPU the sum and the rotated heads are deferred: the norm, or the attention, takes the operands and computes both in
one launch. Any other operation that meets a deferred tensor gets its value, computed by the plain kernels, with the
same bits. Only forwards without gradients defer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ....kernels.layers.rms_norm import NormRule, rms_norm, rms_norm_of_sum
from ....kernels.layers.rotary import rotary
from ....kernels.machine.gpu import triton_serves

IS_USED: set[str] = set()  # not empty once this process has deferred a tensor: never on a CPU
_waiting: weakref.WeakValueDictionary[int, Deferred] = weakref.WeakValueDictionary()  # by id: without their value


class Deferred(Tensor):
    """A tensor of a known shape without memory. `value()` computes it once, and every operation on it does so."""

    _value: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, *_: object) -> Deferred:
        made = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made._value = None
        IS_USED.add("yes")
        _waiting[id(made)] = made
        return made

    def value(self) -> Tensor:
        """Return the plain tensor."""
        if self._value is None:
            self._compute()
        assert self._value is not None
        return self._value

    def set(self, value: Tensor) -> None:
        """Take the value that a kernel has computed."""
        self._value = value
        _waiting.pop(id(self), None)

    def _compute(self) -> None:
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*plain(args), **plain(dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*plain(args), **plain(dict(kwargs or {})))


class DeferredSum(Deferred):
    """left + right, of one shape and dtype."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self._operands = left, right

    def _compute(self) -> None:
        self.set(torch.add(*self._operands))

    def normed(self, weight: Tensor, rule: NormRule) -> Tensor:
        """Return the norm of the sum, and keep the sum, both from one launch if it has not been computed yet."""
        if self._value is not None:
            return rms_norm(self._value, weight, rule)
        total, normed = rms_norm_of_sum(*self._operands, weight, rule)
        self.set(total)
        return normed


class DeferredRotation(Deferred):
    """The rotated query, or the rotated key: two tensors of one `Rotation`."""

    def __init__(self, _: Tensor, rotation: Rotation) -> None:
        self.rotation = rotation

    def _compute(self) -> None:
        self.rotation.compute()


class Rotation:
    """Queries [B,H,T,D] and keys [B,K,T,D] that cos and sin [1 or B,T,D] rotate."""

    def __init__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.operands = query, key, cos, sin
        self.query, self.key = (DeferredRotation(like, self) for like in (query, key))

    def compute(self) -> None:
        """Compute both tensors."""
        for tensor, value in zip((self.query, self.key), rotary(*self.operands), strict=True):
            tensor.set(value)

    @staticmethod
    def of(query: Tensor, key: Tensor) -> Rotation | None:
        """Return the rotation of which these are query and key, if neither has been read."""
        found = query.rotation if isinstance(query, DeferredRotation) else None
        is_it = found is not None and found.query is query and found.key is key
        return found if is_it and query._value is None and key._value is None else None  # type: ignore[attr-defined]


def plain(value: Any) -> Any:
    """Replace deferred tensors in a value, nested or not, by their values."""
    return tree_map_only(Deferred, Deferred.value, value)


def compute_all() -> None:
    """Compute all deferred tensors: before an operation that may change their operands in place."""
    for tensor in list(_waiting.values()):
        tensor.value()


def is_any_waiting() -> bool:
    """Return whether a deferred tensor has no value yet."""
    return bool(_waiting)


def add(left: Any, right: Any, **options: Any) -> Tensor:
    """Compute torch.add, deferred where a kernel can compute it with the norm that may follow."""
    left, right = plain(left), plain(right)
    if options or not (isinstance(left, Tensor) and isinstance(right, Tensor) and _may_defer(left, right)):
        return torch.add(left, right, **options)
    return DeferredSum(left, right)


def _may_defer(left: Tensor, right: Tensor) -> bool:
    same = left.shape == right.shape and left.dtype is right.dtype and left.device == right.device
    needs_grad = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    return same and left.dim() > 1 and left.is_floating_point() and triton_serves(left.device) and not needs_grad
