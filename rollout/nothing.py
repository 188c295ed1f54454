"""A context that does nothing, for paths that every step takes."""

from __future__ import annotations

from contextlib import AbstractContextManager


class _Nothing:
    """Enter and leave at the cost of two calls of the interpreter's own functions: contextlib.nullcontext runs Python.

    `format` of an empty string takes any arguments, and returns what is false: no exception is suppressed.
    """

    __enter__ = "".format
    __exit__ = "".format


NOTHING: AbstractContextManager[None] = _Nothing()  # type: ignore[assignment]  # reusable: it holds nothing
