"""Errors that are sent from one rank to another, as their class name and text only."""

from __future__ import annotations

import builtins
import json

import torch
import torch.distributed as dist

from ...kernels.collectives.exchange import ExchangeFailed
from .. import errors

# Words in the text of a group's errors, which are plain RuntimeErrors; NCCL's and the store's have their own classes.
_OF_OTHER_ARGUMENTS = (UnicodeError, OSError, BaseExceptionGroup)  # than a text
_OF_A_GROUP = ("gloo", "NCCL", "ProcessGroup")


def is_of_a_group(error: BaseException) -> bool:
    """Return whether a group of processes raised the error: its cause is then another rank or the network."""
    if isinstance(error, dist.DistError | ExchangeFailed):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_A_GROUP)


def error_bytes(error: BaseException) -> bytes:
    """Encode an error as JSON."""
    ids = error.ids if isinstance(error, errors.BrokenLogits) else ()
    return json.dumps({"kind": type(error).__name__, "message": str(error), "ids": ids}).encode()


def error_from(data: bytes, where: str) -> Exception:
    """Decode an error of the same class, with the place where it was raised at the front of its message.

    A RuntimeError if the class is neither Lockstep's nor built in.
    """
    given = json.loads(data)
    kind = given["kind"]
    found = torch.OutOfMemoryError if kind == "OutOfMemoryError" else getattr(errors, kind, None)
    found = found or getattr(builtins, kind, None)
    text = f"{where}: {given['message']}" if where else given["message"]
    if found is errors.BrokenLogits:
        return errors.BrokenLogits(text, given["ids"])
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _OF_OTHER_ARGUMENTS):
        return found(text)
    return RuntimeError(f"{text} ({kind})")
