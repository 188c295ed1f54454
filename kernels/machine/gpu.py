"""Whether the Triton kernels serve a device. Nothing here imports Triton before it is known to be wanted.

The rule, for people: Triton serves a CUDA (or ROCm) device where it is installed, finds a C compiler for its launchers
and is not switched off by `LOCKSTEP_TRITON=0`; everything else runs the PyTorch paths. Triton decides whether kernels
are interpreted (`TRITON_INTERPRET=1`, for tests without a GPU) as they are imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache

import torch


def triton_serves(device: torch.device) -> bool:
    """Whether operations on this device choose the Triton kernels. The answer holds for the life of the process."""
    return why_not_triton(device.type) is None


@cache
def why_not_triton(device_type: str) -> str | None:
    """None where the Triton kernels serve devices of this type, else the reason in words."""
    if device_type != "cuda":
        return f"Triton kernels serve CUDA devices, not {device_type}"
    if os.environ.get("LOCKSTEP_TRITON") == "0":
        return "switched off by LOCKSTEP_TRITON=0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(shutil.which(name) for name in compilers):
        return f"Triton needs a C compiler for its launchers: {' and '.join(compilers)} not found on PATH"
    return None
