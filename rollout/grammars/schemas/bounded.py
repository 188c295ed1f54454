"""Texts of bounded length in schemas: the grammar engine lets them hold control characters, which JSON does not."""

from __future__ import annotations

from typing import Any

from .references import copied

_CHARACTER = r'[^"\\\x00-\x1f]'  # as the engine reads the bounds, which allow no escapes
_MOST = 1000  # characters; the time to compile a pattern grows with the square of its repeats


def without_control_characters(schema: Any) -> Any:
    """Return a copy of a schema in which a pattern stands in the place of each text's bounds; those of very long texts
    stay. The schema has been checked: no other keyword stands beside them."""
    return copied(schema, _with_pattern)


def _with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Return one schema with a pattern in the place of its bounds, if it has some."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if (not least and most == "") or max(least, most or 0) > _MOST:
        return schema
    others = {name: value for name, value in schema.items() if name not in ("minLength", "maxLength")}
    return {**others, "pattern": f"^{_CHARACTER}{{{least},{most}}}$"}
