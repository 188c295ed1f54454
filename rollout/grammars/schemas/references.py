"""References inside a schema, such as #/$defs/NAME: JSON pointers (RFC 6901) in the fragment of an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

_MOST_HOPS = 64  # from reference to reference
_MOST_DIGITS = 9  # of the index of a list
_VALUES = ("const", "enum", "default", "examples")  # hold values, and no schemas
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # hold schemas by names
_TARGETS = "$targets"


def resolved(schema: object, root: object) -> object:
    """Return what a schema's reference names, and what that one's does; a schema without one as it is."""
    for _ in range(_MOST_HOPS):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        if (found := target(reference, root)) is None:
            return schema
        schema = found
    return schema


def target(reference: str, root: object) -> object | None:
    """Return the part of a schema that a reference names; None: there is none."""
    marker, *parts = unquote(reference).split("/")
    if marker != "#":
        return None
    found = root
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and _is_index(key) and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS and (key == "0" or not key.startswith("0"))


def replaced(schema: Any, name: Callable[[str], str]) -> Any:
    """Return a copy of a schema in which every reference is the one that `name` returns for it."""
    return _replaced(schema, name, is_schema=True)


def _replaced(part: Any, name: Callable[[str], str], *, is_schema: bool) -> Any:
    if isinstance(part, list):
        return [_replaced(member, name, is_schema=is_schema) for member in part]
    if not isinstance(part, dict):
        return part
    copy: dict[str, Any] = {}
    for key, value in part.items():
        if is_schema and key == "$ref" and isinstance(value, str):
            copy[key] = name(value)
        elif is_schema and key in _VALUES:
            copy[key] = value
        else:
            copy[key] = _replaced(value, name, is_schema=not (is_schema and key in _BY_NAME))
    return copy


def with_plain_references(schema: Any) -> Any:
    """Return a schema of the same meaning whose references the grammar engine reads: it knows the names of objects
    alone, no escapes and no lists. Other references get a copy of their target; without any, it is the schema itself.

    The schema has been checked: every reference has a target.
    """
    copies: dict[str, Any] = {}
    names: dict[str, str] = {}  # of the copies, by reference
    box = _TARGETS
    while isinstance(schema, dict) and box in schema:
        box += "_"

    def name(reference: str) -> str:
        if _is_plain(reference, schema):
            return reference
        if reference not in names:
            own = names[reference] = str(len(names))
            copies[own] = replaced(target(reference, schema), name)
        return f"#/{box}/{names[reference]}"

    found = replaced(schema, name)
    return {**found, box: copies} if copies else schema


def _is_plain(reference: str, root: Any) -> bool:
    marker, *parts = reference.split("/")
    found = root
    for part in parts:
        if not part or "~" in part or "%" in part or not isinstance(found, dict):
            return False
        found = found.get(part)
    return marker == "#"
