"""Environment variables that switch something off."""

from __future__ import annotations

import os
from collections.abc import Mapping


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a variable is not 0. Raises ValueError for a value that is neither 0 nor 1."""
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}: it is 0 or 1")
    return value != "0"
