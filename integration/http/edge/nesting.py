"""The limit on how deep the values of a request are nested.

Python's functions for JSON call themselves for each level, on a stack whose room depends on their callers: a value that
one of them has read may be too deep for another one. What is read is therefore held well below that.
"""

from __future__ import annotations

import json
from typing import Any

from ....rollout.giving_way import give_way

MAX_NESTING = 512  # lists and objects within one another


class TooDeep(ValueError):
    """A value is nested too deeply."""

    def __init__(self) -> None:
        super().__init__(f"nested too deeply: more than {MAX_NESTING} lists and objects within one another")


def lists_in(value: list[object] | dict[str, object]) -> tuple[int, int]:
    """Count the lists and objects of a value, itself included, and its levels of them."""
    num, depth = 0, 0
    level: list[Any] = [value]
    while level:
        give_way()
        num, depth = num + len(level), depth + 1
        entries = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [one for given in entries for one in given if isinstance(one, dict | list)]
    return num, depth


def check_nesting(value: object, text: str, most: int = MAX_NESTING) -> None:
    """Check a value that was read from a text, which is walked through only if that has brackets enough. most: levels.
    Raises TooDeep."""
    if text.count("[") + text.count("{") <= most:
        return
    if isinstance(value, dict | list) and lists_in(value)[1] > most:
        raise TooDeep


def parse_text(text: str) -> Any:
    """Return the value of a JSON text in a request. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise TooDeep from None
    check_nesting(value, text)
    return value
