"""The grammar library xgrammar: the only place that imports it, with the first grammar.

Its functions are used below its Python classes, whose modules import torch and transformers: a process that only
compiles grammars needs neither, and starts in a fraction of a second without them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib.metadata import version
from typing import Any

from ..errors import GrammarsUnavailable

_MASKS_ON_DEMAND = (0, 2, 9)  # the release since which the compiler may make masks when they are needed
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


def make_compiler(library: Any, vocabulary: Any) -> Any:
    """Make the library's compiler, with one thread, without a cache, and with all masks made ahead.

    library: what `load_library` returned; vocabulary: its TokenizerInfo. Raises GrammarsUnavailable for a release of
    the library whose compiler takes other arguments.
    """
    release = version("xgrammar")
    options: list[object] = [1, False, -1]
    if tuple(int(number) for number in re.findall(r"\d+", release)[:3]) >= _MASKS_ON_DEMAND:
        options.append(False)
    try:
        return library.GrammarCompiler(vocabulary, *options)
    except TypeError as error:
        raise GrammarsUnavailable(f"xgrammar {release} is not known here, 0.2.8 and 0.2.9 are: {error}") from error
