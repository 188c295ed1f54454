"""A reader of nested dataclasses of settings from TOML values. It reports all faults at once, each by its key."""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_SHOWN = 100  # characters of a wrong value in a message


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set the value of one `section.key=value` in nested sections. Raises ValueError naming the fault."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"override {override!r} is not of the form key=value")
    *sections, name = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{key}: {section} is a value, not a section")
    try:
        values[name] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[name] = text
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{key}: {error}") from error


def build(cls: type, values: object, prefix: str, faults: list[str]) -> Any:
    """Make a settings object from a mapping. With faults, adds them to the list and returns None."""
    if not isinstance(values, Mapping):
        faults.append(f"{prefix.rstrip('.')} must be a section, not {_short(values)}")
        return None
    known = {f.name: f for f in fields(cls)}
    types = get_type_hints(cls)
    before = len(faults)
    faults += [f"unknown key {prefix}{name}{nearest(str(name), prefix, known)}" for name in values if name not in known]
    chosen = {}
    for name, spec in known.items():
        if name not in values:
            # A section without its own table may have required keys, which are reported too.
            if spec.default is MISSING and spec.default_factory is MISSING:
                if is_dataclass(types[name]):
                    build(types[name], {}, f"{prefix}{name}.", faults)
                else:
                    faults.append(f"missing key {prefix}{name}")
        elif is_dataclass(types[name]):
            chosen[name] = build(types[name], values[name], f"{prefix}{name}.", faults)
        elif (section := section_of_each(types[name])) and isinstance(values[name], Mapping):
            chosen[name] = {
                key: build(section, value, f"{prefix}{name}.{key}.", faults) for key, value in values[name].items()
            }
        else:
            chosen[name] = typed(values[name], types[name], f"{prefix}{name}", faults)
    if len(faults) > before:
        return None
    try:
        return cls(**chosen)
    except ValueError as error:
        faults.append(str(error))
        return None


def section_of_each(wanted: Any) -> type | None:
    """Return the section that each entry of a table is, if a setting of this type is a table of such."""
    each = get_args(wanted)[1] if get_origin(wanted) is dict else None
    return each if isinstance(each, type) and is_dataclass(each) else None


def nearest(name: str, prefix: str, known: Iterable[str]) -> str:
    """Return a hint at the known key that is most like this one, or an empty text."""
    lowered = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), lowered, 1)
    return f" (is it {prefix}{lowered[found[0]]}?)" if found else ""


def typed(value: object, wanted: Any, key: str, faults: list[str], is_secret: bool = False) -> object:
    """Convert the value to the wanted type: an integer is accepted for a float, a text for a path. Adds a fault for
    another type, which does not show a value that is secret."""
    # None stands where nothing is said, which JSON can write, and TOML cannot.
    if value is None and NoneType in get_args(wanted):
        return None
    allowed = [one for one in get_args(wanted) if one is not NoneType] if isinstance(wanted, UnionType) else [wanted]
    if float in allowed and isinstance(value, int) and _is_of(value, float):
        return float(value)
    if Path in allowed and isinstance(value, str):
        return Path(value)
    if not any(_is_of(value, one) for one in allowed):
        given = "" if is_secret else f", not {_short(value)}"
        faults.append(f"{key} must be {' or '.join(map(_kind, allowed))}{given}")
    return value


def _is_of(value: object, wanted: Any) -> bool:
    """Return whether a value is of a type: a plain one, or a list or table of such. The names that a Literal has are
    left to the class of the settings."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if wanted is object or origin is Literal:
        return True
    if origin in (list, tuple):
        return isinstance(value, origin) and all(_is_of(one, parts[0]) for one in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(_is_of(one, parts[1]) for one in value.values())
    if isinstance(value, bool) or wanted is bool:
        return isinstance(value, bool) and wanted is bool
    if wanted is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, wanted)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _kind(wanted: Any) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    if section_of_each(wanted):
        return "a table of sections, each with a name"
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (list, tuple):
        return f"a list, each of {_kind(parts[0])}"
    if origin in (dict, Mapping):
        return "a table" if parts[1] is object else f"a table, each of {_kind(parts[1])}"
    return names.get(wanted, "anything")
