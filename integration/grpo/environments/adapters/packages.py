"""The packages that adapters need, which are extras."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def refuse_without(name: str, extra: str) -> None:
    """Raise ValueError where a package is not installed. extra: that which installs it."""
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # a module of that name without a spec
        found = None
    if found is None:
        raise ValueError(f"this environment needs the package {name}: pip install 'lockstep[{extra}]'")


def package(name: str, extra: str) -> Any:
    """Import a package. Raises ValueError as `refuse_without`."""
    refuse_without(name, extra)
    return importlib.import_module(name)
