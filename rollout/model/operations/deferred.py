"""Tensors of a module's forward whose value is computed when it is read, by one kernel with what follows if possible.

A module's own code adds a residual and then calls a norm, or normalises the heads of its queries and keys, rotates them
and then calls the attention. On a GPU the sum, the norms of heads and the rotated heads are deferred: the norm, or the
attention, takes the operands and computes all in one launch. Any other operation that meets a deferred tensor gets its
value, computed by the plain kernels, with the same bits. Only forwards without gradients defer.

A forward that began with gradients defers nothing, not even where they are off inside it: a reentrant checkpoint runs a
layer so and hands its result to autograd, which would mark a tensor that the next operation replaces by its value.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

from ....kernels.layers.rms_norm import NormRule, rms_norm, rms_norm_of_sum
from ....kernels.layers.rotary import HeadNorms, rotary
from ....kernels.machine.gpu import triton_serves

IS_USED: set[str] = set()  # not empty once this process has deferred a tensor: never on a CPU
_forward = threading.local()  # .has_gradients: whether the forward that this thread is in began with gradients


class _Waiting(threading.local):
    """The deferred tensors that a thread has made, without their value. Another thread may not compute them: it would
    do so on its own stream, and outside of a capture that this thread may be in."""

    def __init__(self) -> None:
        self.by_id: weakref.WeakValueDictionary[int, Deferred] = weakref.WeakValueDictionary()


_waiting = _Waiting()


class Deferred(Tensor):
    """A tensor of a known shape without memory. `value()` computes it once, and every operation on it does so."""

    _value: Tensor | None
    _waits_in: weakref.WeakValueDictionary[int, Deferred]  # of the thread that made it

    @staticmethod
    def __new__(cls, like: Tensor, *_: object) -> Deferred:
        made = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made._value = None
        IS_USED.add("yes")
        made._waits_in = _waiting.by_id
        made._waits_in[id(made)] = made
        return made

    def value(self) -> Tensor:
        """Return the plain tensor."""
        if self._value is None:
            # As where it was deferred, without gradients; the mode around a forward would defer the operation again.
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._compute()
        assert self._value is not None
        return self._value

    def set(self, value: Tensor) -> None:
        """Take the value that a kernel has computed."""
        self._value = value
        self._waits_in.pop(id(self), None)

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

    def set(self, value: Tensor) -> None:
        super().set(value)
        del self._operands  # a residual lives for a whole layer

    def _compute(self) -> None:
        self.set(torch.add(*self._operands))

    def normed(self, weight: Tensor, rule: NormRule) -> Tensor:
        """Return the norm of the sum, and keep the sum, both from one launch if it has not been computed yet."""
        if self._value is not None:
            return rms_norm(self._value, weight, rule)
        total, normed = rms_norm_of_sum(*self._operands, weight, rule)
        self.set(total)
        return normed


class DeferredNorm(Deferred):
    """The norm of the heads x [B,...,D] of four dimensions; dimensions 1 and 2 may be exchanged before it is read."""

    def __init__(self, x: Tensor, weight: Tensor, rule: NormRule, untransposed: DeferredNorm | None = None) -> None:
        self.x, self.weight, self.rule = x, weight, rule
        self._untransposed = untransposed  # whose value this one's is a view of

    def _compute(self) -> None:
        if self._untransposed is None:
            self.set(rms_norm(self.x, self.weight, self.rule))
        else:
            self.set(self._untransposed.value().transpose(1, 2))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        turns = func is Tensor.transpose and tuple(args[1:]) in ((1, 2), (2, 1)) and not kwargs
        if turns and isinstance(norm := args[0], DeferredNorm) and norm._value is None:
            return DeferredNorm(norm.x.transpose(1, 2), norm.weight, norm.rule, norm)
        return super().__torch_function__(func, types, args, kwargs)

    @staticmethod
    def of(query: object, key: object) -> HeadNorms | None:
        """Return the norms of which these are the results, if they have one rule and neither has been read."""
        if not (isinstance(query, DeferredNorm) and isinstance(key, DeferredNorm) and query.rule == key.rule):
            return None
        is_read = any(each is not None and each._value is not None for norm in (query, key)
                      for each in (norm, norm._untransposed))  # fmt: skip
        return None if is_read else HeadNorms(query.weight, key.weight, query.rule)


class DeferredRotation(Deferred):
    """One of the two tensors of a `Rotation`: the rotated query, part 0, or the rotated key, part 1."""

    def __init__(self, _: Tensor, rotation: Rotation, part: int) -> None:
        self.rotation, self.part = rotation, part

    def _compute(self) -> None:
        self.set(self.rotation.values()[self.part])


class Rotation:
    """Queries [B,H,T,D] and keys [B,K,T,D] that cos and sin [1 or B,T,D] rotate, after their norms if these wait.

    Its tensors hold it, and not the other way round: so they are freed, with their operands, where nothing reads them.
    """

    def __init__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.norms = DeferredNorm.of(query, key)
        if isinstance(query, DeferredNorm) and isinstance(key, DeferredNorm) and self.norms is not None:
            self._heads: tuple[Tensor, Tensor] = query, key
            query, key = query.x, key.x
        else:
            query, key = plain((query, key))
            self._heads = query, key
        self.operands: tuple[Tensor, Tensor, Tensor, Tensor] = query, key, plain(cos), plain(sin)
        self._values: tuple[Tensor, Tensor] | None = None

    def deferred(self) -> tuple[DeferredRotation, DeferredRotation]:
        """Return the rotated query and key, which wait."""
        return DeferredRotation(self.operands[0], self, 0), DeferredRotation(self.operands[1], self, 1)

    def values(self) -> tuple[Tensor, Tensor]:
        """Return the rotated query and key; they are computed once."""
        if self._values is None:
            query, key = plain(self._heads)
            self._values = rotary(query, key, *self.operands[2:])
        return self._values

    @staticmethod
    def of(query: Tensor, key: Tensor) -> Rotation | None:
        """Return the rotation of which these are query and key, if neither has been read."""
        if not (isinstance(query, DeferredRotation) and isinstance(key, DeferredRotation)):
            return None
        found = query.rotation
        is_it = found is key.rotation and (query.part, key.part) == (0, 1)
        return found if is_it and found._values is None else None


def plain(value: Any) -> Any:
    """Replace deferred tensors in a value, nested or not, by their values. A value without any is returned itself."""
    if isinstance(value, Tensor):
        return value.value() if isinstance(value, Deferred) else value
    if not tree_any(lambda part: isinstance(part, Deferred), value):
        return value
    return tree_map_only(Deferred, Deferred.value, value)


def compute_all() -> None:
    """Compute all deferred tensors: before an operation that may change their operands in place."""
    for tensor in list(_waiting.by_id.values()):
        tensor.value()


def is_any_waiting() -> bool:
    """Return whether a deferred tensor has no value yet."""
    return bool(_waiting.by_id)


@contextmanager
def in_forward() -> Iterator[None]:
    """Begin a forward of the whole module, in this thread: with gradients, as they are now, nothing in it waits."""
    outer = getattr(_forward, "has_gradients", False)
    _forward.has_gradients = torch.is_grad_enabled()
    try:
        yield
    finally:
        _forward.has_gradients = outer


def may_wait(*operands: Tensor) -> bool:
    """Return whether an operation on the operands may wait: a kernel serves it, and autograd does not need it."""
    needs_grad = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    return triton_serves(operands[0].device) and not needs_grad and not getattr(_forward, "has_gradients", False)


def norm(x: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
    """Compute a norm; deferred where x is heads, and a kernel can compute it with the rotation that may follow."""
    if x.dim() == 4 and may_wait(x, weight):
        return DeferredNorm(x, weight, rule)
    return rms_norm(x, weight, rule)


def add(input: Any, other: Any, **options: Any) -> Tensor:
    """Compute torch.add, deferred where a kernel can compute it with the norm that may follow."""
    left, right = plain(input), plain(other)
    if options or not (isinstance(left, Tensor) and isinstance(right, Tensor) and _may_defer(left, right)):
        return torch.add(left, right, **options)
    return DeferredSum(left, right)


def _may_defer(left: Tensor, right: Tensor) -> bool:
    same = left.shape == right.shape and left.dtype is right.dtype and left.device == right.device
    return same and left.dim() > 1 and left.is_floating_point() and may_wait(left, right)
