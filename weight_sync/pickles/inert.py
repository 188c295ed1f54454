"""A parser of pickles that runs nothing: a stack machine over `pickletools.genops` that makes plain values and records.

Python's own unpickler calls the functions that the bytes name; a `find_class` table limits the names, but the bytes
still choose calls, attributes and memo sizes. Here a name becomes a `Global`, a call becomes a `Call`, and neither
reaches a Python function: the reader of the result decides the meaning of each call. Names are compared whole, as
(module, name).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

MAX_OPCODES = 2_000_000  # about two seconds and 200 MB of small values; a tensor takes about 40
MAX_NESTED_OPCODES = 4 * MAX_OPCODES  # of all pickles inside a pickle together, of which one is held at a time

_MARK = object()


class UnsafePickle(ValueError):
    """A name, call or operation in the payload that this reader does not know."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name in the payload; nothing was imported for it."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Call:
    """A call, or a new object of a class, in the payload; nothing was called for it."""

    function: Global
    arguments: tuple[object, ...]
    state: object = None  # the state that the payload sets on the object
    reading: object = None  # what its reader made of it: a call that is named many times is read once


@dataclass
class Budget:
    """The opcodes that may still be parsed."""

    num_left: int

    def take(self) -> None:
        """Count one opcode. Raises UnsafePickle when none is left."""
        if self.num_left <= 0:
            raise UnsafePickle("more opcodes than a payload of tensors needs, in all its parts together")
        self.num_left -= 1


def parse(data: bytes, allowed: Collection[tuple[str, str]], budget: Budget | None = None) -> object:
    """Parse a pickle to None, bool, int, float, str, bytes, tuple, list, dict with str keys, Global or Call.

    Values may contain each other, and themselves: walk them by the shape you expect, and do not print or compare them.
    budget: of several pickles together, besides the limit of each. Raises UnsafePickle for a name that is not in
    `allowed`, quoting it, for opcodes that no tensor payload needs, and for too many; ValueError for bytes that are no
    pickle.
    """
    machine = _Machine(allowed)
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if count >= MAX_OPCODES:
            raise UnsafePickle(f"a payload of more than {MAX_OPCODES} opcodes")
        if budget is not None:
            budget.take()
        if opcode.name == "STOP":
            assert position is not None, "the position of every opcode in bytes is known"
            if position != len(data) - 1:
                raise ValueError(f"{len(data) - 1 - position} bytes after the end of the pickle")
            return machine.result()
        step = _STEPS.get(opcode.name)
        if step is None:
            raise UnsafePickle(f"blocked pickle opcode {opcode.name} at byte {position}")
        step(machine, argument)
    raise AssertionError("genops ends with a STOP or raises")


class _Machine:
    """The stack, where marks are the starts of groups, and the memo."""

    def __init__(self, allowed: Collection[tuple[str, str]]) -> None:
        self.allowed = allowed
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def result(self) -> object:
        value = self.pop()
        if self.stack:
            raise ValueError(f"{len(self.stack)} values are left at the end of the pickle")
        return value

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> object:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("a pickle that takes more than it put down")
        return self.stack.pop()

    def top(self) -> object:
        value = self.pop()
        self.stack.append(value)
        return value

    def group(self) -> list[object]:
        """Take all values above the last mark, and the mark."""
        values: list[object] = []
        while self.stack:
            value = self.stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(value)
        raise ValueError("a pickle that closes a group it did not open")

    def take(self, count: int) -> list[object]:
        return [self.pop() for _ in range(count)][::-1]

    def name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise UnsafePickle("a global whose name is not a string")
        if (module, name) not in self.allowed:
            raise UnsafePickle(f"blocked unsafe global {module[:200]}.{name[:200]}")
        self.push(Global(module, name))

    def call(self) -> None:
        function, arguments = self.take(2)
        if type(function) is not Global or type(arguments) is not tuple:
            raise UnsafePickle("a call of something that is not a name")
        self.push(Call(function, arguments))

    def build(self) -> None:
        target, state = self.take(2)
        if type(target) is not Call or target.state is not None:
            raise UnsafePickle("a state for something that is not a new object")
        target.state = state
        self.push(target)

    def extend(self, values: list[object]) -> None:
        target = self.top()
        if type(target) is not list:
            raise UnsafePickle("items for something that is not a list")
        target.extend(values)

    def update(self, values: list[object]) -> None:
        target = self.top()
        keys = values[::2]
        if type(target) is not dict or len(values) % 2 or any(type(key) is not str for key in keys):
            raise UnsafePickle("items for something that is not a dict with string keys")
        target.update(zip(keys, values[1::2], strict=True))

    def remember(self, index: int) -> None:
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError(f"a pickle that recalls {index}, which it did not store")
        self.push(self.memo[index])

    def dictionary(self) -> None:
        values = self.group()
        self.push({})
        self.update(values)


_Step = Callable[[_Machine, Any], None]  # with the opcode's argument, of the type that genops gives it
_PUSHED = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINBYTES BINBYTES BINBYTES8"
)
_STEPS: dict[str, _Step] = {
    **dict.fromkeys(_PUSHED.split(), lambda machine, value: machine.push(value)),
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, index: machine.remember(index)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, index: machine.recall(index)),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda machine, _: machine.call()),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "MARK": lambda machine, _: machine.push(_MARK),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.group())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "LIST": lambda machine, _: machine.push(machine.group()),
    "DICT": lambda machine, _: machine.dictionary(),
    "APPEND": lambda machine, _: machine.extend(machine.take(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.group()),
    "SETITEM": lambda machine, _: machine.update(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.group()),
    "GLOBAL": lambda machine, names: machine.name(*names.partition(" ")[::2]),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.take(2)),
    "BUILD": lambda machine, _: machine.build(),
}
