"""Copies of a function that find other values under its global names.

transformers decorates forwards, for names of arguments that have changed, say. The copy keeps the decorators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any


def innermost(function: object) -> FunctionType | None:
    """Return the function inside the decorators (`__wrapped__`); None if that is no function written in Python."""
    inner = inspect.unwrap(function) if callable(function) else None
    return inner if isinstance(inner, FunctionType) else None


def with_names(function: Callable[..., Any], names: Mapping[str, object]) -> FunctionType | None:
    """Return a copy of a function whose innermost code finds these values under its global names.

    None where a decorator does not keep the function that it decorates in its closure.
    """
    if not isinstance(function, FunctionType):
        return None
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return _copy(function, {**function.__globals__, **names}, function.__closure__)
    changed = with_names(inner, names)
    cells = function.__closure__ or ()
    if changed is None or not any(_holds(cell, inner) for cell in cells):
        return None
    copy = _copy(
        function, function.__globals__, tuple(CellType(changed) if _holds(cell, inner) else cell for cell in cells)
    )
    copy.__wrapped__ = changed  # type: ignore[attr-defined]
    return copy


def _copy(function: FunctionType, scope: dict[str, object], closure: tuple[CellType, ...] | None) -> FunctionType:
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False
