"""Calls of native functions that are made one after another by a single call, without Python between them.

Between two calls a thread takes Python's global lock again, which another one, of a server for instance, may hold for
milliseconds. A playlist is one call, during which the others run.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from . import native

SOURCE = "machine/play.cpp"
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments


class _Recorded(ctypes.Structure):
    """The C++ struct `Recorded` of play.cpp, field by field."""

    _fields_ = (("function", ctypes.c_void_p), ("words", ctypes.c_void_p))


class Playlist:
    """Calls in their order. The arguments, and the memory that they point into, must stay where they are."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Pack the calls, each of which `can_play`."""
        play = _play()
        assert play is not None
        self._play, self._count = play, len(calls)
        self._words = [_words(function, arguments) for function, arguments in calls]
        recorded = [
            _Recorded(native.packed_of(function), ctypes.addressof(words))
            for (function, _), words in zip(calls, self._words, strict=True)
        ]
        self._recorded = (_Recorded * len(calls))(*recorded)

    def __call__(self) -> int:
        """Make the calls. Returns 0, or 1 + the index of the one that returned an error, after which none is made."""
        failed: int = self._play(self._recorded, self._count)
        return failed


def can_play(function: Callable[..., Any]) -> bool:
    """Return whether a playlist can hold calls of this function: a native one with a packed variant."""
    return native.packed_of(function) is not None and _play() is not None


def _words(function: Any, arguments: tuple[Any, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Return the arguments as they lie in memory, one word each."""
    types = function.argtypes
    words = [_word(kind, argument) for kind, argument in zip(types, arguments, strict=True)]
    return (ctypes.c_int64 * len(words))(*words)


def _word(kind: type, argument: Any) -> int:
    if isinstance(argument, ctypes.Structure | ctypes.Array):
        return ctypes.addressof(argument)
    if kind is ctypes.c_float:
        return int(struct.unpack("=q", struct.pack("=fI", argument, 0))[0])
    return 0 if argument is None else int(argument)


def _play() -> Callable[..., Any] | None:
    return native.function(SOURCE, "lockstep_play", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64)
