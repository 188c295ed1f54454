"""Checks of plain values from outside: JSON objects, sizes, counts, digests."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TypeGuard

_MAX_NAMED = 20  # in one message


def parse_object(text: bytes) -> dict[str, object]:
    """Parse a JSON object without duplicate keys. Raises ValueError with the reason for any other text."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            more = f" and {len(twice) - _MAX_NAMED} more" if len(twice) > _MAX_NAMED else ""
            raise ValueError(f"names more than once: {', '.join(twice[:_MAX_NAMED])}{more}")
        return values

    try:
        values = json.loads(text.decode(), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"is not a JSON object but {type(values).__name__}")
    return values


def are_sizes(values: object) -> bool:
    """Return whether a value is a list of counts, so that sums and products of a few of them cost nothing."""
    return isinstance(values, list) and all(map(is_count, values))


def is_digest(value: object) -> bool:
    """Return whether a value is a SHA-256 in hex."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_count(value: object, limit: int = 1 << 62) -> TypeGuard[int]:
    """Return whether a value is an int, and no bool, of at least 0 and below `limit`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit
