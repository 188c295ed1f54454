"""The grammar library xgrammar: the only place that imports it, with the first grammar.

Its functions are used below its Python classes, whose modules import torch and transformers: a process that only
compiles grammars needs neither, and starts in a fraction of a second without them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

_NOT_INSTALLED = "json_schema, regex, ebnf and structural_tag need the extra `grammar`: pip install -e '.[grammar]'"


def load_library() -> Any:
    """Return the library's functions. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("xgrammar").base._core
    except ImportError as error:
        raise ValueError(_NOT_INSTALLED) from error


def load_library_alone() -> Any:
    """Return the library's functions in a process that has no other use for torch. Changes what it can import.

    Raises ValueError if it is not installed.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # the binding imports it where it can
    found = importlib.util.find_spec("xgrammar")
    if found is None:
        raise ValueError(_NOT_INSTALLED)
    sys.modules["xgrammar"] = importlib.util.module_from_spec(found)  # the package without its __init__
    for name in ("load_binding", "exception"):
        importlib.import_module(f"xgrammar.{name}")
    return importlib.import_module("xgrammar.base")._core
