"""A few elements of each tensor, as bytes: they show most writes that torch's version counters do not count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

NUM_ELEMENTS = 32  # of a tensor: an optimizer's step in bfloat16 changes at least one element in a hundred
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def weight_samples(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    """Return the bytes of up to `NUM_ELEMENTS` elements of each tensor, at places that follow from its layout alone.

    A tensor without memory, or with elements of another size than 1, 2, 4 or 8 bytes, has b"". Tensors of a device are
    read together, with one wait for it.
    """
    found: dict[str, bytes] = {}
    views: defaultdict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors:
        found[name] = b""
        view = _view(tensor.detach())
        if view is not None:
            views[view.device, view.dtype].append((name, view))
    for named in views.values():
        if len(named) == 1:  # as of a tensor that is about to be written: nothing to join
            [(name, view)] = named
            found[name] = view.cpu().numpy().tobytes()
            continue
        values = torch.cat([view for _, view in named]).cpu().numpy()
        ends = np.cumsum([0, *(len(view) for _, view in named)]).tolist()
        for (name, _), (begin, end) in zip(named, pairwise(ends), strict=True):
            found[name] = values[begin:end].tobytes()
    return found


def _view(tensor: Tensor) -> Tensor | None:
    """Return the elements [up to NUM_ELEMENTS] of a tensor that are looked at, as integers; None: there are none."""
    kind = _INTEGERS.get(tensor.element_size())
    if kind is None or tensor.is_meta or not tensor.numel() or not tensor.untyped_storage().nbytes():
        return None
    if tensor.is_contiguous():
        size, step = tensor.numel(), 1
    else:  # along the longest dimension
        size, step = max(zip(tensor.shape, tensor.stride(), strict=True))
    count = min(size, NUM_ELEMENTS)
    apart = (size // count - 1) | 1  # odd, so that not all of them lie in one column
    return tensor.view(kind).as_strided((count,), (apart * step,), tensor.storage_offset())
