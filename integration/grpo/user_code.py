"""The import of functions that users wrote (rewards, environments), and the concurrent calls of coroutine functions."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

CARRIED = ("success_at", "is_repeatable")  # attributes that a function keeps when options are bound to it


def imported(location: str, what: str, or_else: str = "") -> object:
    """Import what is at "module:name" or "path/to/file.py:name"; after the colon, dots name attributes of classes.

    what: the kind of it, for errors; or_else: what a location may be besides. Raises ValueError, in one line that names
    `location`.
    """
    module_name, colon, path = location.partition(":")
    if not (colon and module_name and path):
        raise ValueError(f"{what} {location!r}: 'module:function' or 'file.py:function' is needed{or_else}")
    if module_name.startswith("."):
        raise ValueError(f"{what} {location!r}: {module_name!r} must be an absolute module name")
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise ValueError(f"{what} {location!r}: there is no file {module_name!r} in {Path.cwd()}")
    try:
        found: object = _module(module_name)
    except ImportError as error:
        raise ValueError(f"{what} {location!r}: cannot import {module_name!r}: {_one_line(error)}") from error
    except SystemExit as error:
        why = f"importing {module_name!r} ends the program (exit code {error.code})"
        remedy = 'put what it runs as a program behind `if __name__ == "__main__":`'
        raise ValueError(f"{what} {location!r}: {why}: {remedy}") from error
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise ValueError(f"{what} {location!r}: {where}: {_one_line(error.msg)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(f"{what} {location!r}: {module_name!r} has no {path!r}")
        found = getattr(found, name)
    return found


def bound(found: object, what: str, location: str, options: Mapping[str, object] | None) -> Callable[..., Any]:
    """Return a function with its options as keywords. Raises ValueError, which names it, for what cannot be called or
    has no such option."""
    if not callable(found):
        raise ValueError(f"{what} {location!r}: a {type(found).__name__} cannot be called")
    if not options:
        return found
    known = inspect.signature(found).parameters
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{what} {location!r} has no option {' and '.join(unknown)}")
    partial = functools.partial(found, **options)
    for name in CARRIED:
        if hasattr(found, name):
            setattr(partial, name, getattr(found, name))
    return partial


async def results_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all calls concurrently, and return their results in order. The first error ends the others, so that nothing
    goes on in the background; it is raised as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _module(name: str) -> ModuleType:
    """Import the module of that name, or the file, where the name ends in ".py"."""
    return _file_module(Path(name).resolve()) if name.endswith(".py") else importlib.import_module(name)


def _file_module(path: Path) -> ModuleType:
    """Import a file, once. It can import what lies beside it, as a program could."""
    name = str(path)
    if name not in sys.modules:
        if (folder := str(path.parent)) not in sys.path:
            sys.path.append(folder)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # of a path that ends in ".py"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # as an import does: a dataclass of the module looks its module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
