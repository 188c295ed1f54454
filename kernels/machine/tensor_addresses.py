"""Whether tensors still lie where they lay, looked at before each replay of a recorded step."""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import native

SOURCE = "machine/tensor_addresses.cpp"
_is_there = partial(operator.is_not, None)


class _Reader(ctypes.Structure):
    """The C++ struct `Reader` of tensor_addresses.cpp, field by field, and so are the next two."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("data_ptr", ctypes.c_void_p),
        ("none", ctypes.c_void_p),
        ("type_offset", ctypes.c_int64),
        ("tensor_offset", ctypes.c_int64),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (("type", ctypes.c_void_p), ("address", ctypes.c_void_p), ("lines", ctypes.c_void_p * 3))


class _Look(ctypes.Structure):
    _fields_ = (
        ("reader", ctypes.c_void_p),
        ("dicts", ctypes.c_void_p),
        ("num_dicts", ctypes.c_int64),
        ("tensors", ctypes.c_void_p),
        ("num_tensors", ctypes.c_int64),
    )


class TensorAddresses:
    """The addresses of the tensors that dicts hold, as a module's layers do, beside None. No tensor is kept alive."""

    def __init__(self, owners: Sequence[dict[str, Any]]) -> None:
        """Note the addresses of now. owners: kept, and looked at again; at least those of them that hold something."""
        self._owners = [owner for owner in owners if owner]
        self._addresses = self._now()
        self._kept: object = None  # what the native look reads
        self._look = self._native_look()

    def are_same(self) -> bool:
        """Return whether the same dicts hold as many tensors at the same addresses, in the same order.

        A tensor of another type may count as moved.
        """
        return self._addresses == self._now() if self._look is None else bool(self._look())

    def _tensors(self) -> filter[Tensor]:
        return filter(_is_there, chain.from_iterable(map(dict.values, self._owners)))

    def _now(self) -> list[int]:
        # Little Python: the weights of the last step have pushed all of these objects out of the caches.
        return list(map(Tensor.data_ptr, self._tensors()))

    def _native_look(self) -> Callable[[], int] | None:
        """Return a function that looks natively; None where it cannot."""
        found = _reader()
        if found is None:
            return None
        are_there, reader = found
        tensors = list(self._tensors())
        dicts = (ctypes.c_void_p * len(self._owners))(*map(id, self._owners))
        known = (_Tensor * len(tensors))(*map(_known, tensors, self._addresses))
        look = _Look(
            ctypes.addressof(reader), ctypes.addressof(dicts), len(dicts), ctypes.addressof(known), len(known)
        )  # fmt: skip
        # Types are kept: the address of one that is gone might become that of another.
        self._kept = reader, dicts, known, look, {type(tensor) for tensor in tensors}
        return partial(are_there, ctypes.addressof(look))


def _known(tensor: Tensor, address: int) -> _Tensor:
    has_storage = type(tensor) in (Tensor, torch.nn.Parameter)  # subclasses may refuse to show one
    lines = id(tensor), tensor._cdata, tensor.untyped_storage()._cdata if has_storage else 0
    return _Tensor(id(type(tensor)), address, (ctypes.c_void_p * 3)(*lines))


@cache
def _reader() -> tuple[Callable[[int], int], _Reader] | None:
    """Return the native function and what it reads with; None without a compiler, without Python's global lock, and
    where this PyTorch's tensors do not show where they are."""
    library = native.load(SOURCE)
    offsets = _offsets()
    if library is None or offsets is None or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    torch_library = next(Path(torch.__file__).parent.glob("lib/*torch_cpu.*"), None)
    if torch_library is None:
        return None
    data_ptr = getattr(ctypes.CDLL(str(torch_library)), "aoti_torch_get_data_ptr", None)
    if data_ptr is None:
        return None
    are_there = ctypes.PyDLL(str(library.path)).lockstep_are_there
    are_there.argtypes, are_there.restype = [ctypes.c_void_p], ctypes.c_int64
    next_ = ctypes.cast(ctypes.pythonapi.PyDict_Next, ctypes.c_void_p).value
    return are_there, _Reader(next_, ctypes.cast(data_ptr, ctypes.c_void_p).value, id(None), *offsets)


def _offsets() -> tuple[int, int] | None:
    """Return where a tensor's object has its type and the pointer to its implementation, which is all that PyTorch's
    C++ tensor is; None unless two tensors of two types agree in it."""
    found = []
    for tensor in (torch.empty(2, dtype=torch.float32), torch.nn.Parameter(torch.empty(3, dtype=torch.float32))):
        words = memoryview(ctypes.string_at(id(tensor), torch.Tensor.__basicsize__)).cast("q").tolist()
        wanted = id(type(tensor)), tensor._cdata
        if any(words.count(word) != 1 for word in wanted):
            return None
        found.append((8 * words.index(wanted[0]), 8 * words.index(wanted[1])))
    return found[0] if found[0] == found[1] else None
