"""The fields of a row that ready rewards read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import regex

from .scoring_process import ScoringProcess

_SCHEMA_LIMIT_S = 5.0  # of the check of one schema, which then counts as right


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


def refuse_blank(answer: str) -> None:
    """Raise ValueError for an answer that an empty completion would equal."""
    if not answer.strip():
        raise ValueError('the answer is blank; with data.answer_field="" rows have none')


# The reading of a row, by reward.
_READ: Mapping[str, Callable[..., object]] = {
    "matches": pattern_of, "follows_schema": schema_of, "reasoning_gym": entry_of,
}  # fmt: skip
_COMPARE = ("exact_answer", "math_verify")  # rewards that read the answer
RowCheck = Callable[[Mapping[str, Any], str], object]  # takes a row and its answer


def row_check(name: str, options: Mapping[str, object], process: ScoringProcess) -> RowCheck | None:
    """Return a function that raises ValueError for a row that lacks what the reward of that name reads of it, or has a
    wrong schema; None for a reward that reads no fields. options: of the reward; process: reads schemas."""
    if name in _COMPARE:
        return lambda row, answer: refuse_blank(answer)
    found = _READ.get(name)
    if found is None:
        return None
    read = partial(found, **{key: value for key, value in options.items() if key in signature(found).parameters})
    if name != "follows_schema":
        return lambda row, answer: read(row)
    right: set[object] = set()  # schemas; many rows may have the same

    def check(row: Mapping[str, Any], answer: str) -> None:
        if (schema := read(row)) not in right:
            process.score("schema", (schema,), _SCHEMA_LIMIT_S)
            right.add(schema)

    return check
