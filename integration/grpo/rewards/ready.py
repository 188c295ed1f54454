"""Ready rewards, named in a config by their function's name alone.

Each takes a row and a completion; settings of its own come from the table `reward_options.NAME`. Patterns and schemas
are a row's own where it has the field that the option names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import regex

_LIMIT_S = 1.0  # of one search: a pattern may take exponential time


def exact_answer(prompt: str, completion: str, answer: str) -> float:
    """Return 1.0 if the completion's final answer is `answer`, else 0.0. White space around either is ignored.

    The final answer is the text after the last "=", or the whole completion.
    """
    wanted = answer.strip()
    final = completion.rpartition("=")[2].strip()
    return float(final == wanted or completion.strip() == wanted)


def matches(row: Mapping[str, Any], completion: str, *, pattern: str = "", field: str = "pattern") -> float:
    """Return 1.0 if the whole completion, without white space around it, matches a regular expression, else 0.0.

    pattern: of all rows; empty: each row's own, in its field `field`. A search that takes over a second is no match.
    Raises ValueError for a row without a pattern, or for a pattern that is wrong.
    """
    chosen = pattern or _text(row, field, "pattern")
    try:
        return float(regex.fullmatch(chosen, completion.strip(), timeout=_LIMIT_S) is not None)
    except TimeoutError:
        return 0.0
    except regex.error as error:
        raise ValueError(f"the pattern {chosen!r} is wrong: {error}") from None


def follows_schema(row: Mapping[str, Any], completion: str, *, schema: str = "", field: str = "schema") -> float:
    """Return 1.0 if the completion is JSON that a JSON schema allows, else 0.0.

    schema: of all rows, as JSON text; empty: each row's own, in its field `field`, as JSON text or an object. Needs
    the package jsonschema. Raises ValueError for a row without a schema, or for a schema that is wrong.
    """
    import jsonschema  # of the extra `train`

    try:
        value = json.loads(completion)
    except (ValueError, RecursionError):
        return 0.0
    given = schema or row.get(field)
    if isinstance(given, str):
        given = json.loads(given)
    if given is None:
        raise ValueError(f"the row has no schema in its field {field!r}, and the option schema is empty")
    try:
        jsonschema.validate(value, given)
    except jsonschema.ValidationError:
        return 0.0
    except jsonschema.SchemaError as error:
        raise ValueError(f"the schema is wrong: {error.message}") from None
    return 1.0


def short_enough(row: Mapping[str, Any], completion: str, *, target: int = 200, slack: int = 100) -> float:
    """Return 1.0 for a completion of up to `target` characters, then less, down to 0.0 at `target + slack`.

    Raises ValueError for a target or slack that is not positive.
    """
    if target < 1 or slack < 1:
        raise ValueError(f"target and slack must be at least 1, not {target} and {slack}")
    return min(1.0, max(0.0, 1.0 - (len(completion) - target) / slack))


SUCCESS_AT = {exact_answer: 1.0, matches: 1.0, follows_schema: 1.0}
for _reward, _least in SUCCESS_AT.items():
    _reward.success_at = _least  # type: ignore[attr-defined]


def _text(row: Mapping[str, Any], field: str, option: str) -> str:
    value = row.get(field)
    if not isinstance(value, str | int | float) or value == "":
        raise ValueError(f"the row has no text in its field {field!r} (the option {option} names another)")
    return str(value)
