"""References inside a schema, such as #/$defs/NAME."""

from __future__ import annotations

_MOST_HOPS = 64  # from reference to reference


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
    found = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found
