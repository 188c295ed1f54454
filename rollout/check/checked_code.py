"""A description of a hosted module's code and shape, equal in two processes exactly where a check has one result."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model.hosted_model import HostedModel

_PLAIN = (bool, int, float, str, type(None))
_OF_A_FOLDER = ("_name_or_path", "name_or_path")  # a moved folder has the same model
_INNER = ("__wrapped__", "__func__", "fget", "fset")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_Function = tuple[str, str, str, int]  # its class, its own name, file and line


def describe_module(hosted: HostedModel) -> list[object] | None:
    """Describe the module by its configuration, classes, plain attributes and parameters, and the files of its code.

    Values of weights have no part in it. Returns None for a module whose code is in no file (of a notebook, of
    Python's prompt) or differs from that of its classes: an instance has a forward of its own, or hooks.
    """
    module, guarantee = hosted.module, hosted.numerics.guarantee
    parts = list(module.named_modules())
    if any(_is_changed(part) for _, part in parts):
        return None
    functions: set[_Function] = set()
    for kind in {base for _, part in parts for base in type(part).__mro__ if base is not object}:
        found = _functions(kind)
        if found is None:
            return None
        functions.update(found)
    config = {name: value for name, value in module.config.to_dict().items() if name not in _OF_A_FOLDER}
    return [
        config, [(name, _name(type(part)), part.training, _attributes(part)) for name, part in parts],
        [(name, p.dtype, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()],
        [(*names, line, _digest(file)) for *names, file, line in sorted(functions)],
        hosted.dtype, str(hosted.device), hosted.k_blocks, guarantee and guarantee.choices,
        torch.is_inference_mode_enabled(),
    ]  # fmt: skip


def _is_changed(part: nn.Module) -> bool:
    own = vars(part)
    return any(callable(value) and hasattr(type(part), name) for name, value in own.items()) or any(
        own.get(name) for name in _HOOKS
    )


def _attributes(part: nn.Module) -> list[tuple[str, Any]]:
    return [(n, v) for n, v in sorted(vars(part).items()) if type(v) in _PLAIN and n not in _OF_A_FOLDER]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _functions(kind: type) -> set[_Function] | None:
    """Return the functions of a class, also those that were put into it, and those inside decorators and properties.

    None: some are in no file. Functions of torch's own classes are left out: its version tells their code.
    """
    name = _name(kind)
    of_torch = kind.__module__.split(".")[0] == "torch"
    own_file = getattr(sys.modules[kind.__module__], "__file__", None) or ""
    found: set[_Function] = set() if of_torch else {(name, "", own_file, 0)}
    waiting: list[Any] = list(vars(kind).values())
    while waiting:
        value = waiting.pop()
        waiting += [inner for attribute in _INNER if (inner := getattr(value, attribute, None)) is not None]
        if (code := getattr(value, "__code__", None)) is not None and not (of_torch and _is_torch(code.co_filename)):
            found.add((name, code.co_qualname, code.co_filename, code.co_firstlineno))
    is_known = kind.__module__ != "__main__" and all(Path(file).is_file() for _, _, file, _ in found)
    return found if is_known else None


def _is_torch(file: str) -> bool:
    return file.startswith(str(Path(torch.__file__).parent))


@cache
def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
