"""The recognition of memory that the machine does not give."""

from __future__ import annotations

import torch

from ..errors import LockstepError

# Texts of torch's RuntimeErrors on a CPU, which has no class of its own for them.
_CPU_TEXTS = ("not enough memory", "can't allocate memory", "Storage size calculation overflowed", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an operation failed for want of memory, on the host or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, LockstepError)
    return is_torchs and any(text in str(error) for text in _CPU_TEXTS)
