"""The types that JSON schemas name, and values of them."""

from __future__ import annotations

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip


def types_of(schema: dict) -> list[str]:
    """Return the types that a schema declares."""
    types = schema.get("type")
    return [types] if isinstance(types, str) else [t for t in listed(types) if isinstance(t, str)]


def has_type(value: object, name: str) -> bool:
    """Return whether a value is of the type of this name."""
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES.get(name, ()))


def listed(value: object) -> list:
    """Return a list as it is; [] for anything else."""
    return value if isinstance(value, list) else []


def kind_of(value: object) -> str:
    """Return the name of a value's type."""
    return next(name for name, kind in TYPES.items() if isinstance(value, kind))
