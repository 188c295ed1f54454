"""Settings of a command, read from `key=value` flags and tables of a config file, and built into dataclasses."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_type_hints

from ...grpo.settings.reading import typed

T = TypeVar("T")


def read_settings(flag: str, items: Sequence[str]) -> dict[str, object]:
    """Read settings from `key=value` items and JSON objects. A later item replaces an earlier one.

    A value is read as JSON, or as plain text where it is not JSON. Raises ValueError naming the flag and the item.
    """
    settings: dict[str, object] = {}
    for item in items:
        if item.lstrip().startswith("{"):
            try:
                settings.update(json.loads(item))
            except json.JSONDecodeError as error:
                raise ValueError(f"{flag} {item!r} is not JSON: {error.msg} at column {error.colno}") from error
            except RecursionError as error:
                raise ValueError(f"{flag} {item[:40]!r}... is nested too deeply") from error
            continue
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{flag} {item!r} is neither key=value nor a JSON object")
        try:
            settings[key.strip()] = json.loads(text)
        except json.JSONDecodeError:
            settings[key.strip()] = text
        except RecursionError as error:
            raise ValueError(f"{flag} {item[:40]!r}... is nested too deeply") from error
    return settings


def read_tables(path: str | None) -> dict[str, dict[str, object]]:
    """Read the tables of a config file of `lockstep serve`. Raises ValueError naming the fault."""
    tables: dict[str, dict[str, object]] = {"engine": {}, "http": {}, "service": {}}
    if path is None:
        return tables
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if wrong := sorted(found.keys() - tables.keys()):
        raise ValueError(f"--config {path}: unknown table {', '.join(wrong)}; known: {', '.join(tables)}")
    if wrong := [f"{name} must be a table, not {table!r}" for name, table in found.items() if type(table) is not dict]:
        raise ValueError(f"--config {path}: {'; '.join(wrong)}")
    return tables | found


def build(kind: type[T], settings: dict[str, object]) -> T:
    """Make a dataclass of settings. Raises ValueError listing every unknown setting, or every one of a wrong type."""
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(settings.keys() - known.keys()):
        raise ValueError(f"unknown setting: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    types, wrong = get_type_hints(kind), list[str]()
    chosen = {
        name: typed(value, types[name], name, wrong, is_secret=not known[name].repr) for name, value in settings.items()
    }
    if wrong:
        raise ValueError("; ".join(wrong))
    return kind(**chosen)


def named(flag: str, make: Callable[[], T]) -> T:
    """Call `make`, and put the flag before the message of a ValueError that it raises."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
