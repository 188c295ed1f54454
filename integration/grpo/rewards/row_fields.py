"""The fields of a row that ready rewards read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import regex


def pattern_of(row: Mapping[str, Any], *, pattern: str = "", field: str = "pattern") -> regex.Pattern[str]:
    """Return the pattern of all rows, or the row's own. Raises ValueError where there is none, or a wrong one."""
    chosen = pattern or row.get(field)
    if not isinstance(chosen, str | int | float) or chosen == "":
        raise ValueError(f"the row has no text in its field {field!r}, and the option pattern is empty")
    try:
        return regex.compile(str(chosen))
    except regex.error as error:
        raise ValueError(f"the pattern {chosen!r} is wrong: {error}") from None


def schema_of(row: Mapping[str, Any], *, schema: str = "", field: str = "schema") -> str:
    """Return the schema of all rows, or the row's own, as text. Raises ValueError where there is none, or no JSON."""
    given = schema or row.get(field)
    if given is None:
        raise ValueError(f"the row has no schema in its field {field!r}, and the option schema is empty")
    try:
        return given if isinstance(given, str) else json.dumps(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the schema is wrong: {error}") from None


def entry_of(row: Mapping[str, Any], *, dataset: str = "") -> tuple[str, dict[str, Any]]:
    """Return the name of the row's dataset, and its entry. Raises ValueError for a row that is no entry."""
    entry = row.get("entry", row)
    metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
    if not isinstance(metadata, Mapping) or "answer" not in entry:
        raise ValueError("the row is no entry of a Reasoning Gym dataset, and has none: answer and metadata are needed")
    name = dataset or row.get("dataset") or metadata.get("source_dataset")
    if not isinstance(name, str):
        raise ValueError("the row names no dataset of Reasoning Gym, and the option dataset is empty")
    return name, dict(entry)


# The reading of a row, by reward.
_READ: Mapping[str, Callable[..., object]] = {
    "matches": pattern_of, "follows_schema": schema_of, "reasoning_gym": entry_of,
}  # fmt: skip


def row_check(name: str, options: Mapping[str, object]) -> Callable[[Mapping[str, Any]], object] | None:
    """Return a function that raises ValueError for a row that lacks what the reward of that name reads of it; None for
    a reward that reads no fields. options: of the reward."""
    read = _READ.get(name)
    if read is None:
        return None
    return partial(read, **{key: value for key, value in options.items() if key in signature(read).parameters})
