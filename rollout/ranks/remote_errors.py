"""Errors that pass from one rank to another: as their kind and text, nothing else."""

from __future__ import annotations

import builtins
import json

import torch
import torch.distributed as dist

from .. import errors

# What a group's operation raises says so only in its text; NCCL's and the store's have classes of their own.
_OF_A_GROUP = ("gloo", "NCCL", "ProcessGroup")


def is_of_a_group(error: BaseException) -> bool:
    """Whether a process group raised it: another rank is the reason, or the network."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_A_GROUP)


def error_bytes(error: BaseException) -> bytes:
    """An error as JSON."""
    return json.dumps({"kind": type(error).__name__, "message": str(error)}).encode()


def error_from(data: bytes, where: str) -> Exception:
    """The same kind of error, whose message begins with where it was raised; a RuntimeError where the kind is neither
    Lockstep's nor built in."""
    given = json.loads(data)
    kind = given["kind"]
    found = torch.OutOfMemoryError if kind == "OutOfMemoryError" else getattr(errors, kind, None)
    found = found or getattr(builtins, kind, None)
    text = f"{where}: {given['message']}" if where else given["message"]
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, UnicodeError | OSError):
        return found(text)
    return RuntimeError(f"{text} ({kind})")
