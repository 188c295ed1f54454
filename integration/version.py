"""The version of Lockstep."""

from __future__ import annotations

import configparser
import importlib.metadata
from pathlib import Path

PACKAGE = __package__.split(".")[0]


def version() -> str:
    """Return the version of the installed package, or of this checkout."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        config = configparser.ConfigParser()
        config.read(Path(__file__).parent.parent / "setup.cfg")
        return f"{config['metadata']['version']} (not installed)"
