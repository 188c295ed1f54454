"""Decode steps on a CPU, recorded as a list of calls and replayed without the module's Python.

While a step is recorded, a dispatch mode records torch's operations and `native.run` records our kernels' calls. Their
results are placed in memory that belongs to the record; views and Python's own work are not replayed. As with CUDA
graphs, a record is valid while the memory that it reads does not move, and only if no operation depends on the data's
values. A GPU refuses other steps during a capture; a CPU does not, so a record is compared with a plain step first.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ...kernels.layers.rms_norm import with_sum
from ...kernels.machine import native
from ..model.fused_layers import has_hooks
from .recorders import Run

logger = logging.getLogger(__name__)

PLAIN_STEPS = 8  # of a size before it is recorded: about the time that recording and trying take
_ALIGNMENT = 64
_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided}
_REFUSED = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CPUGraphs:
    """A recorder of one module's steps."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def record(self, run: Run) -> Run:
        """Return the function to call in place of `run`. Its results are tensors that the next call may overwrite.

        `run` reads and writes fixed memory and returns its results.
        """
        modules = list(self._module.modules())
        return _Step(run, lambda: has_hooks(modules))


class _Step:
    """A step that runs plain a few times, is recorded, tried on the next call, and replayed from then on."""

    def __init__(self, run: Run, has_hooks: Callable[[], bool]) -> None:
        self._run, self._has_hooks = run, has_hooks
        self._num_plain = 0
        self._record: _Record | None = None
        self.is_trusted: bool | None = None  # None until the trial; False: this step stays a plain call

    def __call__(self) -> Sequence[Tensor]:
        if self.is_trusted is False or self._has_hooks():
            return self._run()
        if self.is_trusted and self._record is not None:
            return self._record.replay() or self._run()
        if self._record is not None:
            return self._try(self._record)
        self._num_plain += 1
        if self._num_plain <= PLAIN_STEPS:
            return self._run()
        try:
            self._record = _Recording().record(self._run)
        except _Unrecordable as reason:
            self._give_up(str(reason))
            return self._run()
        return self._record.results

    def _try(self, record: _Record) -> Sequence[Tensor]:
        replayed = record.replay()
        found = None if replayed is None else [result.clone() for result in replayed]
        expected = self._run()
        self.is_trusted = found is not None and all(map(torch.equal, found, expected))
        if not self.is_trusted:
            self._give_up("a replay had other results")
        return expected

    def _give_up(self, why: str) -> None:
        logger.warning("decode steps are not replayed: %s", why)
        self.is_trusted, self._record = False, None


@dataclass
class _Record:
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]  # in their order; a true result is an error
    results: Sequence[Tensor]
    pieces: list[Tensor]  # the memory whose addresses the calls use

    def replay(self) -> Sequence[Tensor] | None:
        """Replay the calls and return the results; None if a call refuses its input. The plain call explains why."""
        for function, arguments in self.calls:
            if function(*arguments):
                return None
        return self.results


class _Unrecordable(Exception):
    """The step depends on the values of its data."""


class _Recording(TorchDispatchMode):
    """A dispatch mode that records the operations of one run."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = []
        self._pieces = _Pieces()
        # Left, right and their sum, if that was the last call. The reference keeps their memory from being reused.
        self._sum: tuple[Tensor, Tensor, Tensor] | None = None

    def record(self, run: Run) -> _Record:
        with native.recorded_by(self._native_call), self:
            results = run()
        # The calls are made last: a piece that a call references would not be reused for later results.
        return _Record([make() for make in self._calls], results, self._pieces.all)

    def _native_call(self, function: Callable[..., Any], arguments: tuple[Any, ...], kept: object) -> None:
        own = tuple(type(a).from_buffer_copy(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
        if self._sum is not None and (both := with_sum(function, own, *self._sum)) is not None:
            function, own = both
            outside = [tensor for tensor in self._sum if self._pieces.place_of(tensor) is tensor]
            kept = (kept, outside) if outside else kept
            del self._calls[-1]
        self._sum = None
        self._calls.append(lambda: (_keeping(function, kept), own))

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _REFUSED.isdisjoint(func.tags) and not _takes_rows(func, args):
            raise _Unrecordable(f"{func} depends on the data")
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._add(func, args, kwargs, None)
            return out
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        outs = _tensors(out)
        if not outs or all(t.untyped_storage().data_ptr() in inputs or not t.numel() for t in outs):
            return out  # views
        if not isinstance(out, Tensor):
            raise _Unrecordable(f"{func} has several results")
        kept = self._pieces.like(out)
        if func.overloadpacket not in _EMPTY:
            kept.copy_(out)
            self._add(func, args, kwargs, kept)
            if func is _aten.add.Tensor and not kwargs and all(isinstance(arg, Tensor) for arg in args):
                self._sum = (*args, kept)
        return kept

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor | None) -> None:
        self._sum = None
        packed = tree_map(self._pieces.place_of, (args, kwargs, out))

        def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
            args, kwargs, out = tree_map(_tensor_at, packed)
            if out is None:
                return _quiet(partial(func, *args, **kwargs)), ()
            if (variant := _writing_variant(func)) is not None:
                return _quiet(partial(variant, *args, **kwargs, out=out)), ()
            return _quiet(lambda: out.copy_(func(*args, **kwargs))), ()

        self._calls.append(make)


@dataclass(frozen=True)
class _Place:
    """A tensor's place in a piece, without a reference that would keep the piece from being reused."""

    piece: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor at this place."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(self.piece.untyped_storage(), self.offset, self.size, self.stride)


class _Pieces:
    """Memory for a step's intermediate results. A piece is reused once it holds no tensor."""

    def __init__(self) -> None:
        self.all: list[Tensor] = []  # uint8 [bytes]
        self._by_address: dict[int, Tensor] = {}
        self._unused = _num_users(torch.empty(1, dtype=torch.uint8))

    def like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor with the layout of `tensor`."""
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = -(-extent * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        fitting = [p for p in self.all if num_bytes <= len(p) <= 2 * num_bytes and _num_users(p) == self._unused]
        if fitting:
            piece = min(fitting, key=len)
        else:
            piece = torch.empty(num_bytes, dtype=torch.uint8)
            self.all.append(piece)
            self._by_address[piece.data_ptr()] = piece
        return _Place(piece, tensor.dtype, tensor.shape, tensor.stride(), 0).tensor()

    def place_of(self, value: object) -> object:
        if not isinstance(value, Tensor) or not value.numel():
            return value
        piece = self._by_address.get(value.untyped_storage().data_ptr())
        if piece is None:
            return value  # a weight, a buffer, an input
        return _Place(piece, value.dtype, value.shape, value.stride(), int(value.storage_offset()))


def _num_users(piece: Tensor) -> int:
    """Return the number of references to the piece's storage, its own included."""
    return torch._C._storage_Use_Count(piece.untyped_storage()._cdata)


def _tensor_at(value: object) -> object:
    return value.tensor() if isinstance(value, _Place) else value


def _writing_variant(func: Any) -> Any | None:
    """Return the overload with equal arguments that writes its one result to `out`; None if there is none."""
    arguments = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        own = [(a.name, str(a.type)) for a in variant._schema.arguments if not a.is_out]
        outs = [a.name for a in variant._schema.arguments if a.is_out]
        if outs == ["out"] and own == arguments:
            return variant
    return None


def _tensors(tree: object) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found


def _takes_rows(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the operation indexes by numbers. With a mask, the result's size would depend on the data."""
    masks = (torch.bool, torch.uint8)
    return func is _aten.index.Tensor and all(index is None or index.dtype not in masks for index in args[1])


def _quiet(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        call()

    return run


def _keeping(function: Callable[..., Any], kept: object) -> Callable[..., Any]:
    """Return the function with a reference to `kept`, the memory that its arguments point into."""
    if kept is None:
        return function

    def call(*arguments: Any, kept: object = kept) -> Any:
        return function(*arguments)

    call.__name__ = function.__name__
    return call
