"""The import of packages that adapters need, which are extras."""

from __future__ import annotations

import importlib
from typing import Any


def package(name: str, extra: str) -> Any:
    """Import a package. extra: that which installs it. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # something that the package itself needs
        raise ValueError(f"this environment needs the package {name}: pip install 'lockstep[{extra}]'") from error
