"""The reward: 1 for the colour of the picture."""

from __future__ import annotations

from typing import Any


def names_the_colour(row: dict[str, Any], completion: str) -> float:
    """Return 1.0 for the right word."""
    return float(completion.strip() == row["answer"])


names_the_colour.success_at = 1.0  # type: ignore[attr-defined]
