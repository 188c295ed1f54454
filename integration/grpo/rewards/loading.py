"""The import of reward functions, and their forms.

A reward is a function of a row and a completion, of one or many:

    def reward(row, completion) -> float | dict[str, float]
    async def reward(row, completion) -> float | dict[str, float]
    def reward(rows, completions) -> list[float | dict[str, float]]     (the name `rows` says so; async too)
    def reward(prompt, completion, answer) -> float | dict[str, float]

A parameter `info` gets `SampleInfo` besides, or a list of them. A function's attribute `success_at` says from which
value on a completion counts as a success; a component "success" of a dict says so too, and is not added to the total
unless it has a weight. A reward must be a pure function of its arguments: a resumed run scores the same completions
again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from . import ready

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]

# Old locations of our reward functions, with the new names.
_MOVED = {
    "lockstep.integration.rewards:exact_answer": "exact_answer",
    "lockstep.integration.grpo.rewards:exact_answer": "exact_answer",
}
READY = tuple(
    name for name, value in vars(ready).items() if inspect.isfunction(value) and not name.startswith("_")
)  # names that need no module


def load_reward(location: str, options: Mapping[str, object] | None = None) -> RewardFunction:
    """Import the reward function at "module:function" or "path/to/file.py:function" (after the colon, dots name
    attributes of classes), or the ready one of that name, and bind its options.

    An old location of our own functions is accepted, with a logged warning. Raises ValueError, in one line that names
    `location`, if it cannot be imported or called, or has no such option.
    """
    if location in _MOVED:
        logger.warning("reward %r has moved: write %r", location, _MOVED[location])
        location = _MOVED[location]
    found = getattr(ready, location) if location in READY else _imported(location)
    if not callable(found):
        raise ValueError(f"reward {location!r}: a {type(found).__name__} cannot be called")
    if not options:
        return found
    known = inspect.signature(found).parameters
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"reward {location!r} has no option {' and '.join(unknown)}")
    bound = functools.partial(found, **options)
    if hasattr(found, "success_at"):
        bound.success_at = found.success_at  # type: ignore[attr-defined]
    return bound


def _imported(location: str) -> object:
    module_name, colon, path = location.partition(":")
    if not (colon and module_name and path):
        raise ValueError(
            f"reward {location!r}: 'module:function' or 'file.py:function' is needed, or the name of a ready one: "
            f"{', '.join(READY)}"
        )
    found: object = _module(location, module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(f"reward {location!r}: {module_name!r} has no {path!r}")
        found = getattr(found, name)
    return found


def _module(location: str, name: str) -> ModuleType:
    """Import the module of that name, or the file, where the name ends in ".py"."""
    if name.startswith("."):
        raise ValueError(f"reward {location!r}: {name!r} must be an absolute module name")
    if name.endswith(".py") and not Path(name).is_file():
        raise ValueError(f"reward {location!r}: there is no file {name!r} in {Path.cwd()}")
    try:
        return _file_module(Path(name).resolve()) if name.endswith(".py") else importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"reward {location!r}: cannot import {name!r}: {_one_line(error)}") from error
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise ValueError(f"reward {location!r}: {where}: {_one_line(error.msg)}") from error


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
