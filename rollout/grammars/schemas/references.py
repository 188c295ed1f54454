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


def copied(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of a schema in which `change` has changed it, and then every schema inside."""
    return _copied(schema, change, is_schema=True)


def _copied(part: Any, change: Callable[[dict[str, Any]], dict[str, Any]], *, is_schema: bool) -> Any:
    if isinstance(part, list):
        return [_copied(member, change, is_schema=is_schema) for member in part]
    if not isinstance(part, dict):
        return part
    copy: dict[str, Any] = {}
    for key, value in (change(part) if is_schema else part).items():
        is_value = is_schema and key in _VALUES
        copy[key] = value if is_value else _copied(value, change, is_schema=not (is_schema and key in _BY_NAME))
    return copy


def replaced(schema: Any, name: Callable[[str], str]) -> Any:
    """Return a copy of a schema in which every reference is the one that `name` returns for it."""

    def renamed(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        return {**part, "$ref": name(reference)} if isinstance(reference, str) else part

    return copied(schema, renamed)


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
        if not part or "~" in part or "%" in part or part == "patternProperties" or not isinstance(found, dict):
            return False  # the names of patternProperties change later (`with_plain_patterns`)
        found = found.get(part)
    return marker == "#"
