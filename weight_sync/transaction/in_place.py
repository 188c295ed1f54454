"""Weight syncs without a copy: the engine's tensors use the trainer's own storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..manifest import NamedTensors

_MAX_NAMED = 5  # in one message


@dataclass(frozen=True)
class SyncRecord:
    """Record of one weight sync."""

    num_tensors: int
    bytes_copied: int


def write_tensor(resident: Tensor, incoming: Tensor) -> int:
    """Give `resident` the values of `incoming` and return the number of bytes copied: 0 where both are the same memory.
    Shapes and dtypes must agree."""
    if is_same_memory(resident, incoming):
        return 0
    with torch.no_grad():
        resident.copy_(incoming)
    return incoming.nbytes


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same elements at the same addresses and the same layout."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def checked_pairs(source: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the pairs of a trainer's source. Raises ValueError, once it is read, for what yields no names and
    tensors."""
    if isinstance(source, nn.Module | Mapping) or not isinstance(source, Iterable):
        raise ValueError(f"source is a {type(source).__name__}: pass model.named_parameters()")
    for pair in source:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ValueError(
                f"source yields a {type(pair).__name__}, not a name and a tensor: pass model.named_parameters()"
            )
        name, tensor = pair
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            kinds = f"a {type(name).__name__} and a {type(tensor).__name__}"
            raise ValueError(f"source yields {kinds}, not a name and a tensor: pass model.named_parameters()")
        yield name, tensor


def sync_in_place(resident: NamedTensors, trainer: NamedTensors) -> SyncRecord:
    """Check, tensor by tensor, that an engine that aliases its trainer needs no copy, and return the record of the
    sync.

    trainer may name tied tensors more than once. Raises ValueError naming some of the resident tensors that the trainer
    does not name, or stores elsewhere; then nothing was written.
    """
    source = dict(trainer)
    pairs = [(name, tensor, source.get(name)) for name, tensor in resident]
    missing = [name for name, _, other in pairs if other is None]
    foreign = [name for name, tensor, other in pairs if other is not None and not is_same_memory(tensor, other)]
    faults = []
    if foreign:
        faults.append(f"not the trainer's own storage, so they cannot be committed in place: {_some(foreign)}")
    if missing:
        fault = f"not in source, which has to name every parameter: {_some(missing)}"
        faults.append(fault + _hint(missing, source))
    if faults:
        raise ValueError("; ".join(faults))
    return SyncRecord(len(pairs), sum(write_tensor(tensor, other) for _, tensor, other in pairs if other is not None))


def _some(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _hint(missing: list[str], source: Mapping[str, Tensor]) -> str:
    """Return what to do about a prefix that the source's names have before those that are missing; else nothing."""
    for name in missing:
        for other in source:
            if other.endswith("." + name):
                prefix = other.removesuffix(name)
                return (
                    f" (the names in source begin with {prefix!r}, which a wrapper adds: pass those of the module "
                    "inside it)"
                )
    return ""
