"""Checks of plain values from outside: JSON objects, sizes, counts, digests."""

from __future__ import annotations

import json
import re
from typing import TypeGuard


def parse_object(text: bytes) -> dict[str, object]:
    """Parse a JSON object without duplicate keys. Raises ValueError with the reason for any other text."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ValueError(f"names more than once: {', '.join(sorted({k for k in keys if keys.count(k) > 1}))}")
        return dict(pairs)

    try:
        values = json.loads(text.decode(), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"is not a JSON object but {type(values).__name__}")
    return values


def are_sizes(values: object) -> bool:
    """Return whether a value is a list of non-negative integers."""
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def is_digest(value: object) -> bool:
    """Return whether a value is a SHA-256 in hex."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_count(value: object, limit: int = 1 << 62) -> TypeGuard[int]:
    """Return whether a value is an int, and no bool, of at least 0 and below `limit`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit
