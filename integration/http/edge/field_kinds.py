"""The kinds of values that the fields of a body may have, read from its annotations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel


def entries_of(value: object) -> Iterator[tuple[str, object]]:
    """List the entries of a value, each with its name as pydantic has it."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f".{name}", entry) for name, entry in pairs)
    else:
        yield "", value


@cache
def numbers_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields that take numbers and no truth values, which pydantic would read as 0 and 1."""
    kinds = {name: set(_kinds_of(field.annotation)) for name, field in model.model_fields.items()}
    return frozenset(name for name, its in kinds.items() if its & {int, float} and not its & {bool, Any})


@cache
def several_kinds_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields that take several kinds of values, as a text or a list of texts."""
    annotations = {name: field.annotation for name, field in model.model_fields.items()}
    unions = {name: set(get_args(its)) for name, its in annotations.items() if get_origin(its) in (Union, UnionType)}
    return frozenset(name for name, kinds in unions.items() if len(kinds - {type(None)}) > 1)


def _kinds_of(annotation: Any) -> Iterator[Any]:
    """List the plain types that an annotation is made of."""
    if isinstance(annotation, type) or annotation is Any:
        yield annotation
    for part in get_args(annotation):
        yield from _kinds_of(part)
