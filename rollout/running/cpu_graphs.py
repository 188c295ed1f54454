"""Decode steps on a CPU, recorded as a list of calls and replayed without the module's Python.

While a step is recorded, a dispatch mode records torch's operations and `native.run` records our kernels' calls. Their
results are placed in memory that belongs to the record; views and Python's own work are not replayed, and kernels that
follow one another are one call. As with CUDA graphs, a record is valid while the memory that it reads does not move,
and only if neither an operation nor the module's Python depends on the data's values: a step whose data the host reads
is not recorded. A GPU refuses other steps during a capture; a CPU does not, so a record is compared with plain steps
first.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels.collectives.exchange import SharedMemory
from ...kernels.layers.rms_norm import with_sum
from ...kernels.machine import native
from .cpu_record import Keeping, Record
from .recorders import HookWatch, Run, UndispatchedReads, depends_on_data

logger = logging.getLogger(__name__)

PLAIN_STEPS = 4  # of a size before it is recorded: about the time that recording and trying take
TRIALS = 2  # steps that a record is compared with: two in a row may take the same turn in the module's code
LATER_PLAIN_STEPS = 2  # once another size is replayed: this module's steps can be, and sizes that return will again
_ALIGNMENT = 64
_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided}


class CPUGraphs:
    """A recorder of one module's steps."""

    def __init__(self, module: nn.Module, memory: SharedMemory | None = None) -> None:
        """Record nothing yet. memory: through which steps exchange tensors with other ranks, which record the same."""
        self._module, self.memory = module, memory
        self.plain_steps = PLAIN_STEPS  # of a size, before it is recorded

    def record(self, run: Run) -> Run:
        """Return the function to call in place of `run`. Its results are tensors that the next call may overwrite.

        `run` reads and writes fixed memory and returns its results.
        """
        return _Step(run, HookWatch(list(self._module.modules())), self)


class _Step:
    """A step that runs plain a few times, is recorded, tried on the next calls, and replayed from then on.

    Every call makes the step's exchanges with other ranks exactly once, in whatever state the other ranks' steps are.
    """

    def __init__(self, run: Run, has_hooks: Callable[[], bool], graphs: CPUGraphs) -> None:
        self._run, self._has_hooks, self._graphs, self._memory = run, has_hooks, graphs, graphs.memory
        self._num_plain = self._num_trials = 0
        self._record: Record | None = None
        self.is_trusted: bool | None = None  # None until the trials; False: this step stays a plain call

    def __call__(self) -> Sequence[Tensor]:
        if self.is_trusted is False or self._has_hooks():
            return self._run()
        if self.is_trusted and self._record is not None:
            results = self._record.replay()
            return results if results is not None else self._refused()
        if self._record is not None:
            return self._try(self._record)
        self._num_plain += 1
        if self._num_plain <= self._graphs.plain_steps:
            return self._run()
        recording = _Recording()
        results = recording.run(self._run)
        if recording.refusal is None:
            self._record = recording.record(results)
        else:
            self._give_up(recording.refusal)
        return results

    def _refused(self) -> Sequence[Tensor]:
        """Run the step plain after a replay of which a call has refused its input."""
        if self._memory is not None:  # the step may have made some of its exchanges
            raise RuntimeError("a call of a recorded step refused its input")
        return self._run()

    def _try(self, record: Record) -> Sequence[Tensor]:
        """Compare a replay with a plain call, which is right and comes last: it writes what a wrong replay wrote."""
        if self._memory is None:
            found = record.replay_apart()
            expected = self._run()
            self._trust(found, expected)
            return expected
        with self._memory.recorded() as tape:
            expected = [result.clone() for result in self._run()]
        with self._memory.played(tape):
            self._trust(record.replay_apart(), expected)
        if self.is_trusted is not False:
            return expected
        with self._memory.played(tape):
            return self._run()

    def _trust(self, found: Sequence[Tensor] | None, expected: Sequence[Tensor]) -> None:
        self._num_trials += 1
        if found is None or not all(map(torch.equal, found, expected)):
            self._give_up("a replay had other results")
        elif self._num_trials == TRIALS:
            self.is_trusted, self._graphs.plain_steps = True, LATER_PLAIN_STEPS

    def _give_up(self, why: str) -> None:
        logger.warning("decode steps are not replayed: %s", why)
        self.is_trusted, self._record = False, None


class _Recording(TorchDispatchMode):
    """A dispatch mode that records the operations of one run, up to one that cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = []
        self._pieces = _Pieces()
        self._constants = _Constants()
        # Left, right and their sum, if that was the last call. The reference keeps their memory from being reused.
        self._sum: tuple[Tensor, Tensor, Tensor] | None = None
        self.refusal: str | None = None  # why the run cannot be recorded; it goes on unrecorded

    def run(self, run: Run) -> Sequence[Tensor]:
        """Run the step and return its results."""
        with native.recorded_by(self._native_call), UndispatchedReads() as reads, self:
            results = run()
        if reads.first is not None:
            self.refusal = self.refusal or f"{reads.first} depends on the data"
        return results

    def record(self, results: Sequence[Tensor]) -> Record:
        """Return the record of the run with these results."""
        assert self.refusal is None
        # The calls are made last: a piece that a call references would not be reused for later results.
        return Record([make() for make in self._calls], results, self._pieces.all)

    def _native_call(self, function: Callable[..., Any], arguments: tuple[Any, ...], kept: object) -> None:
        if self.refusal is not None:
            return
        own = tuple(type(a).from_buffer_copy(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
        if self._sum is not None and (both := with_sum(function, own, *self._sum)) is not None:
            function, own = both
            outside = [tensor for tensor in self._sum if self._pieces.place_of(tensor) is tensor]
            kept = (kept, outside) if outside else kept
            del self._calls[-1]
        self._sum = None
        self._calls.append(lambda: (function if kept is None else Keeping(function, kept), own))

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # function modes of the module's numerics have had their turn
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _tensors((args, kwargs))
        is_constant = self._constants.hold_all(given)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or (depends_on_data(func, args) and not is_constant):
            self.refusal = self.refusal or f"{func} depends on the data"
        out = func(*args, **kwargs)
        if self.refusal is not None:
            return out
        if func._schema.is_mutable:
            if not is_constant:
                self._constants.note(given, False)
            self._add(func, args, kwargs, None)
            return out
        outs = _tensors(out)
        if func is _aten.lift_fresh.default:  # of a number in the module's code
            self._constants.note(outs, True)
        if not outs:
            return out
        inputs = {tensor.untyped_storage().data_ptr() for tensor in given}
        if all(t.untyped_storage().data_ptr() in inputs or not t.numel() for t in outs):
            return out  # views
        if not isinstance(out, Tensor | tuple) or len(outs) != (1 if isinstance(out, Tensor) else len(out)):
            self.refusal = f"{func} has results other than tensors"
            return out
        kept = [self._pieces.like(tensor) for tensor in outs]
        self._constants.note(kept, is_constant and func.overloadpacket not in _EMPTY)
        if func.overloadpacket not in _EMPTY:
            for own, tensor in zip(kept, outs, strict=True):
                own.copy_(tensor)
            self._add(func, args, kwargs, kept)
            if func is _aten.add.Tensor and not kwargs and all(isinstance(arg, Tensor) for arg in args):
                self._sum = (*args, kept[0])
        return kept[0] if isinstance(out, Tensor) else tuple(kept)

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor] | None) -> None:
        self._sum = None
        packed = _mapped(self._pieces.place_of, (args, kwargs, outs))

        def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
            args, kwargs, outs = _mapped(_tensor_at, packed)
            if outs is None:
                return _quiet(partial(func, *args, **kwargs)), ()
            if (found := _writing_variant(func, len(outs))) is not None:
                variant, names = found
                return _quiet(partial(variant, *args, **kwargs, **dict(zip(names, outs, strict=True)))), ()
            return _quiet(lambda: _copy_each(func(*args, **kwargs), outs)), ()

        self._calls.append(make)


class _Constants:
    """Tensors that are made of numbers in the module's code alone: every step reads the same from them, on the host
    too, as `torch.distributions` does to check its parameters."""

    def __init__(self) -> None:
        self._by_address: dict[int, Tensor] = {}  # of storages, which are kept: no other gets an address of theirs

    def hold_all(self, tensors: list[Tensor]) -> bool:
        """Return whether there are some, all of them constants."""
        return bool(tensors) and all(t.untyped_storage().data_ptr() in self._by_address for t in tensors)

    def note(self, tensors: list[Tensor], are_constant: bool) -> None:
        """Note what was written into the tensors' memory."""
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if are_constant and address:
                self._by_address[address] = tensor.detach()
            else:
                self._by_address.pop(address, None)


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
        self._of_size: dict[int, list[Tensor]] = {}  # uint8 [bytes], by their bytes
        self._by_address: dict[int, Tensor] = {}
        self._unused = _num_users(torch.empty(1, dtype=torch.uint8))

    @property
    def all(self) -> list[Tensor]:
        return [piece for pieces in self._of_size.values() for piece in pieces]

    def like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor with the layout of `tensor`."""
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = -(-extent * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        sizes = sorted(size for size in self._of_size if num_bytes <= size <= 2 * num_bytes)
        unused = (piece for size in sizes for piece in self._of_size[size] if _num_users(piece) == self._unused)
        if (piece := next(unused, None)) is None:
            piece = torch.empty(num_bytes, dtype=torch.uint8)
            self._of_size.setdefault(num_bytes, []).append(piece)
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


def _copy_each(found: Tensor | tuple[Tensor, ...], outs: list[Tensor]) -> None:
    for out, tensor in zip(outs, (found,) if isinstance(found, Tensor) else found, strict=True):
        out.copy_(tensor)


@cache
def _writing_variant(func: Any, num_results: int) -> tuple[Any, list[str]] | None:
    """Return the overload with equal arguments that writes its results to given tensors, and the names of these
    arguments; None if there is none."""
    arguments = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        own = [(a.name, str(a.type)) for a in variant._schema.arguments if not a.is_out]
        outs = [a.name for a in variant._schema.arguments if a.is_out]
        if len(outs) == num_results and own == arguments:
            return variant, outs
    return None


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return what an operator of torch is given, with each value in its tuples, lists and dicts changed.

    torch's own tree_map, which knows every container, takes several times as long as the operator.
    """
    if isinstance(value, tuple | list):
        return type(value)([_mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {name: _mapped(change, part) for name, part in value.items()}
    return change(value)


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _quiet(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        call()

    return run
