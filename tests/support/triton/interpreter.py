"""A faster Triton interpreter with the same results, and with products of blocks that follow from their rows.

Most of the interpreter's time goes into what is the same each time. For each launch and each call of a function it
searches all names of `triton.language` for functions to replace; it makes the type of every intermediate value anew;
for each sum or product of integers it computes whether it overflows, which only a debug mode reads; and it converts
bfloat16 field by field.

A GPU's product of two blocks adds each row's terms in one order, whatever rows stand beside it. The interpreter takes
NumPy's product, and the library behind that has, on some processors, another order for other numbers of rows. Here its
terms are added in twice the precision, so that the rounded sums do not depend on the order.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from types import FunctionType, ModuleType

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_dot_of_numpy = interpreter.InterpreterBuilder.create_dot
_make_block_type = tl.block_type.__init__
_make_np_dtype = interpreter._get_np_dtype
_convert_field_by_field = interpreter._convert_float
_replace_language = interpreter._patch_lang
_replaced: set[tuple[ModuleType, ...]] = set()  # languages whose functions are the interpreter's at the moment
_block_types: dict[tuple[str, tuple[int, ...]], dict[str, object]] = {}
_np_dtypes: dict[str, np.dtype] = {}


@functools.cache
def _builtins_of(package: object) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def _patch_builtin(package: object, builder: object, scope: interpreter._LangPatchScope) -> None:
    for name in _builtins_of(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):  # otherwise an outer function has replaced it already
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def _languages_of(function: FunctionType) -> tuple[ModuleType, ...]:
    known = list(function.__globals__.values())
    return tuple(language for language in (tl, tl.core) if any(value is language for value in known))


def _patch_lang(function: FunctionType) -> interpreter._LangPatchScope:
    """Replace the languages of a function, unless its caller has replaced them."""
    languages = _languages_of(function)
    if languages in _replaced:
        return interpreter._LangPatchScope()
    scope = _replace_language(function)
    _replaced.add(languages)
    restore = scope.restore

    def restore_and_forget() -> None:
        restore()
        _replaced.discard(languages)

    scope.restore = restore_and_forget
    return scope


def _get_np_dtype(dtype: tl.dtype) -> np.dtype:
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _make_np_dtype(dtype.scalar)
    return _np_dtypes[name]


def _convert_float(data: np.ndarray, source: tl.dtype, result: tl.dtype, rounding: object) -> np.ndarray:
    """Convert as the interpreter does, which cuts float32 off to bfloat16; numbers below the normal ones are kept."""
    if rounding is None and (source, result) == (tl.float32, tl.bfloat16):
        return (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if rounding is None and (source, result) == (tl.bfloat16, tl.float32):
        return data.astype(np.uint32) << np.uint32(16)
    return _convert_field_by_field(data, source, result, rounding)


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[int]) -> None:
    sizes = tuple(shape)
    key = (element_ty.name, sizes)
    if not all(type(size) is int for size in sizes):
        _make_block_type(self, element_ty, shape)
        return
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = vars(self).copy()
    self.__dict__.update(_block_types[key], element_ty=element_ty)


@functools.cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _init_tensor(self: tl.tensor, handle: interpreter.TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of(tuple(type.shape) if type.is_block() else ())


def _create_dot(
    self: interpreter.InterpreterBuilder,
    a: interpreter.TensorHandle,
    b: interpreter.TensorHandle,
    d: interpreter.TensorHandle,
    input_precision: object,
    max_num_imprecise_acc: object,
) -> interpreter.TensorHandle:
    if d.data.dtype != np.float32 or a.data.dtype not in (np.float32, np.float16):
        return _dot_of_numpy(self, a, b, d, input_precision, max_num_imprecise_acc)
    with np.errstate(invalid="ignore", over="ignore"):  # as on a GPU
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def make_interpreter_fast() -> None:
    """Make the interpreter remember what it would find or make again, and its products follow from their rows."""
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    interpreter._convert_float = _convert_float
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
