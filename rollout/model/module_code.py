"""Settings, forwards and hooks of a module, which it computes with beside its weights, compared from phase to phase.

A recorded step repeats what they were, and KV is of them. A change that may count is one that counts: KV of another
computation is wrong, KV that is computed again is only late.

settings   plain attributes of a part, such as scales and windows. One that is added after the first look counts if code
           of the module names it, so that a counter which a trainer puts on does not.
forwards   those that instances have of their own, without an engine's numerics and torch.compile, and those of the
           parts' classes.
hooks      equal where function, closure, defaults and globals are plain values, functions, things of torch and parts of
           the module. What other objects hold is not compared: a hook that reads some is another one whenever it is
           registered.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.modules.module as nn_module
from torch import Tensor, nn
from transformers import PreTrainedModel

FUNCTIONS = "forwards or hooks"  # among the names of what has changed
_PLAIN = (bool, int, float, complex, str, Enum, np.generic)  # and kinds of these, as NumPy's numbers
_CONSTANT = (*_PLAIN, bytes, torch.dtype, torch.device)
_LIBRARIES = {"builtins", "logging", "math", "torch", "typing"}  # what is theirs has no state that changes a number
_OF_TRAINING = {"training", "gradient_checkpointing"}  # no phase runs with these: it evaluates, without gradients
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # dictionaries of hooks, by ids that are given once
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
_DEEPEST = 4  # functions inside functions


class ModuleCode:
    """The settings, forwards and hooks of a module whose parts do not change. One thread at a time."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.version = 0  # grows with each look that finds a change; the first one is one
        self.changed: tuple[str, ...] = ()  # names of the settings that changed last, or "forwards or hooks"
        self._parts, self._ids = parts, {id(part) for part in parts}
        self._forwards: list[object] = []
        self._installed: list[object] = []  # forwards of the engine's numerics
        self._settings: list[dict[str, Any]] = []
        self._functions: list[object] = []
        self._names: set[str] = set()  # of the settings at the first look
        self._of_classes: dict[type, tuple[object, object]] = {}  # the forward of each class, with its mark

    def note_forwards(self) -> None:
        """Note the forwards of instances as they are now, without any engine's."""
        self._forwards = [self._mark_of(forward) for forward in self._own_forwards()]

    def note_installed(self) -> None:
        """Note those of the engine's numerics: another one at a look was put over them."""
        self._installed = self._own_forwards()

    def look(self) -> None:
        """Compare settings, forwards and hooks with those of the last look. The engine's numerics are installed."""
        settings = [
            {name: value for name, value in vars(part).items() if _IS_PLAIN[type(value)] and name not in _OF_TRAINING}
            for part in self._parts
        ]
        if not self.version:
            self._names = set().union(*settings)
        pairs = zip(self._own_forwards(), self._installed, strict=True)
        functions = [index if own is mine else self._mark_of(own) for index, (own, mine) in enumerate(pairs)]
        functions += [*self._forwards, *(mark for part in self._parts for mark in self._hooks_of(part))]
        functions += self._marks_of_classes()
        functions += self._marks_of_global_hooks()
        changed = self._changed(settings) if settings != self._settings else []  # the first look finds functions
        if functions != self._functions:
            changed.append(FUNCTIONS)
        if changed:
            self.version, self.changed = self.version + 1, tuple(changed)
        self._settings, self._functions = settings, functions

    def _own_forwards(self) -> list[object]:
        return [vars(part).get("forward") for part in self._parts]

    def _marks_of_classes(self) -> list[object]:
        """Return the marks of the forwards of the parts' classes, in their order. Those that stand there still keep
        theirs."""
        kinds = dict.fromkeys(map(type, self._parts))
        for kind in kinds:
            forward = class_forward(kind)
            if kind not in self._of_classes or self._of_classes[kind][0] is not forward:
                self._of_classes[kind] = forward, self._mark_of(forward)
        return [self._of_classes[kind][1] for kind in kinds]

    def _changed(self, settings: list[dict[str, Any]]) -> list[str]:
        """Return the names of the settings that are others now, without those that no code names."""
        changed: set[str] = set()
        for now, before in zip(settings, self._settings, strict=False):  # the first look has none before
            changed |= {name for name, _ in now.items() ^ before.items()}
        new = changed - self._names
        return sorted(changed - (new - _names_in(self._functions_of_parts()) if new else new))

    def _hooks_of(self, part: nn.Module) -> Iterator[object]:
        """Yield the marks of a part's hooks in their order."""
        own = vars(part)
        for kind, flags in zip(_HOOKS, _HOOK_FLAGS, strict=True):
            if hooks := own[kind]:
                marks = [
                    (self._mark_of(hook, id), id in own[flags])
                    for id, hook in hooks.items()
                    if not _only_requires_grad(hook)
                ]
                if marks:
                    yield kind, _Same(part), marks

    def _marks_of_global_hooks(self) -> list[object]:
        """Return the marks of the hooks that torch calls for every module, in their order."""
        before, behind = nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks
        with_kwargs = nn_module._global_forward_hooks_with_kwargs
        marks: list[object] = [("before", self._mark_of(hook, id)) for id, hook in before.items()]
        return [*marks, *(("behind", self._mark_of(hook, id), id in with_kwargs) for id, hook in behind.items())]

    def _mark_of(self, function: object, registration: object = None) -> object:
        """Return a value that is equal for functions which compute the same. Where that cannot be told, it is of the
        registration, or of the object itself."""
        content = _content(function, self._ids)
        return content or (_Same(function) if registration is None else registration)

    def _functions_of_parts(self) -> Iterator[object]:
        """Yield the functions of the parts' classes and of instances."""
        for kind in {kind for part in self._parts for kind in type(part).__mro__}.difference(PreTrainedModel.__mro__):
            yield from vars(kind).values()
        for part in self._parts:
            own = vars(part)
            for function in (own.get("forward"), *(hook for hooks in _HOOKS for hook in own[hooks].values())):
                yield from (function, *vars(type(getattr(function, "__self__", function))).values())


def class_forward(kind: type) -> object:
    """Return the forward of a class, or that which it inherits, as it stands in the class."""
    return next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)


class _IsPlain(dict[type, bool]):
    """Whether values of a type are compared, by type: asking each value took three times as long."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, _PLAIN)
        return self[kind]


_IS_PLAIN = _IsPlain()


class _Same:
    """Equal to another one of the same object. Keeps the object, so that no other one has its address."""

    __slots__ = ("_thing",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._thing is other._thing


def _requires_grad(module: nn.Module, inputs: object, output: Tensor) -> None:
    output.requires_grad_(True)


def _only_requires_grad(hook: object) -> bool:
    """Return whether a hook does nothing but ask for gradients, which no phase has.

    transformers and PEFT register one more such hook whenever gradient checkpointing is switched on.
    """
    if not isinstance(hook, FunctionType):
        return False
    codes = (hook.__code__, _requires_grad.__code__)
    found, wanted = ((code.co_code, code.co_names, code.co_consts, code.co_argcount) for code in codes)
    return found == wanted


def _content(value: object, parts: Collection[int], depth: int = _DEEPEST) -> object:
    """Return a value that is equal for equal constants, and for functions that compute the same. None: cannot be told.

    parts: ids of the module's parts, whose state is compared by itself.
    """
    if value is None or isinstance(value, _CONSTANT):
        return type(value), value
    if id(value) in parts or _is_of_library(value):
        return _Same(value)
    if isinstance(value, MethodType) and id(value.__self__) in parts:
        return "method", _Same(value.__func__), _Same(value.__self__)
    inside: Iterable[object]
    if isinstance(value, tuple):
        inside = value
    elif isinstance(value, partial):
        inside = (value.func, value.args, *(one for item in value.keywords.items() for one in item))
    elif isinstance(value, FunctionType):
        inside = (value.__defaults__, *(value.__kwdefaults__ or {}).values(), *_read_by(value))
    else:
        return None
    found: list[object] = [getattr(value, "__code__", type(value))]
    for one in inside:
        content = _content(one, parts, depth - 1) if depth else None
        if content is None:
            return None
        found.append(content)
    return found


def _is_of_library(value: object) -> bool:
    """Return whether this is a module, class, function or logger of a library without settings of its own."""
    if isinstance(value, BuiltinFunctionType):
        value = value.__self__  # a module or a class; a bound one's object has state
    if isinstance(value, ModuleType):
        name: object = value.__name__
    elif isinstance(value, type | FunctionType):
        name = value.__module__
    else:
        return isinstance(value, logging.Logger)
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def _read_by(function: FunctionType) -> Iterator[object]:
    """Yield the values that a function reads from its closure and its globals, each with its name."""
    code, scope = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield from (name, _in_cell(cell))
    for name in sorted(_names_of(code)):
        if name in scope:
            yield from (name, scope[name])


def _in_cell(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty as yet
        return None


def _names_in(functions: Iterable[object]) -> set[str]:
    """Return the names of attributes and texts (`getattr`) in these functions and those that they may call by name."""
    names: set[str] = set()
    seen: set[int] = set()
    waiting = list(functions)
    while waiting:
        function = waiting.pop()
        if isinstance(function, partial):
            waiting.append(function.func)
        elif isinstance(function, MethodType | staticmethod | classmethod):
            waiting.append(function.__func__)
        elif isinstance(function, property):
            waiting.append(function.fget)
        elif isinstance(function, FunctionType) and id(function) not in seen and not _is_of_library(function):
            seen.add(id(function))
            names |= _names_of(function.__code__)
            waiting += _read_by(function)
    return names


@lru_cache(maxsize=8192)
def _names_of(code: CodeType) -> frozenset[str]:
    found = set(code.co_names)
    waiting = list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple | frozenset):
            waiting += constant
        elif isinstance(constant, CodeType):
            found |= _names_of(constant)
    return frozenset(found)
