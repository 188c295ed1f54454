"""The search for places in earlier tokens that end like a sequence, and a vote on what followed them, in C++.

A step of many sequences searches for each of them, and Python took a twentieth of the step for it.
`lockstep.rollout.speculation.token_history` has the same in Python, for machines without a compiler.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from ..machine import native

SOURCE = "drafts/votes.cpp"
MAX_PLACES = 64


class Voted(NamedTuple):
    """The tokens that most places went on with."""

    token_ids: list[int]
    num_alike: list[int]  # for each token, the places that it followed
    num_voters: list[int]  # of so many that went on as voted so far
    match: int  # tokens of the ending that are equal at the places


def is_native() -> bool:
    """Return whether there is a C++ compiler, or what it has compiled."""
    return _native() is not None


def vote(
    texts: Sequence[array[int]], ending: bytes, most: int, num_places: int, lengths: tuple[int, ...]
) -> Voted:  # fmt: skip
    """Return what most of the newest `num_places` places with the longest match went on with, token by token.

    texts: tokens, int32, -1 between parts that do not follow each other; the last token of a text is followed by
    nothing. The first text's places count as the newest. ending: the bytes of a sequence's last tokens, int32. most:
    tokens that are told. lengths: of the endings that count as different matches, ascending. Of equally many places the
    newest decides. Needs `is_native()`. Raises ValueError for more than MAX_PLACES places.
    """
    if not 0 < num_places <= MAX_PLACES:
        raise ValueError(f"num_places must be from 1 to {MAX_PLACES}, not {num_places}")
    function, num, most = _native(), len(texts), max(most, 0)
    assert function is not None
    pointers, sizes = _arrays(num)
    addresses = [text.buffer_info() for text in texts]
    at, of = pointers(*[address for address, _ in addresses]), sizes(*[size for _, size in addresses])
    out = (ctypes.c_int32 * (3 * most + 1))()
    start = ctypes.addressof(out)
    found = function(
        at, of, num, ending, len(ending) // 4, most, num_places, _lengths(lengths), len(lengths),
        start, start + 4 * most, start + 8 * most, start + 12 * most,
    )  # fmt: skip
    return Voted(out[:found], out[most : most + found], out[2 * most : 2 * most + found], out[3 * most])


@cache
def _arrays(num: int) -> tuple[Callable[..., object], Callable[..., object]]:
    return ctypes.c_void_p * num, ctypes.c_int64 * num


@cache
def _lengths(lengths: tuple[int, ...]) -> object:
    return (ctypes.c_int32 * len(lengths))(*lengths)


@cache
def _native() -> Callable[..., int] | None:
    library = native.load(SOURCE)
    if library is None:
        return None
    # It keeps the GIL: a search takes microseconds, and another thread would have the interpreter for longer.
    function: Callable[..., int] = ctypes.PyDLL(str(library.path)).vote
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [  # type: ignore[attr-defined]
        pointer, pointer, size, ctypes.c_char_p, size, size, size, pointer, size, pointer, pointer, pointer, pointer,
    ]  # fmt: skip
    function.restype = size  # type: ignore[attr-defined]
    return function
