"""The decision whether the Triton kernels serve a device. Triton is imported only where its kernels are used.

Triton serves a CUDA (or ROCm) device where it is installed, finds a C compiler for its launchers and is not switched
off by `LOCKSTEP_TRITON=0`; all other devices use the PyTorch paths. Triton decides at the import of the kernels whether
they are interpreted (`TRITON_INTERPRET=1`, for tests without a GPU).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache

import torch

from .switches import is_on


def triton_serves(device: torch.device) -> bool:
    """Return whether operations on this device use the Triton kernels. The answer is fixed for the whole process."""
    return why_not_triton(device.type) is None


@cache
def why_not_triton(device_type: str) -> str | None:
    """Return the reason why Triton does not serve devices of this type, or None where it does."""
    if device_type != "cuda":
        return f"Triton kernels serve CUDA devices, not {device_type}"
    if not is_on("LOCKSTEP_TRITON"):
        return "switched off by LOCKSTEP_TRITON=0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(shutil.which(name) for name in compilers):
        return f"Triton needs a C compiler for its launchers: {' and '.join(compilers)} not found on PATH"
    return None
