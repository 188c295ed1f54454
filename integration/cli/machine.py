"""The machine in words: its processor, and the path of our matrix products on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# Features that kernels use.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def machine() -> dict[str, object]:
    """Return the processor's name and the path of products, for a benchmark's report."""
    return {"processor": processor()["processor"], "path": products()}


def processor() -> dict[str, str]:
    """Read the processor's name and features from Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "processor": f"{fields.get('model name', platform.processor() or 'unknown')} ({platform.machine()})",
        "features": " ".join(feature for feature in _FEATURES if feature in flags) or "unknown",
    }


def products() -> str:
    """Describe the path of our products: the level of instructions in each dtype, and a limit that is set."""
    import torch

    from ...kernels.linear import linear
    from ...kernels.machine import native

    if native.load(linear.SOURCE) is None:
        return "the library's"
    dtypes = (torch.float32, torch.bfloat16)
    levels = ", ".join(f"{str(dtype).removeprefix('torch.')} {linear.native_path(dtype)}" for dtype in dtypes)
    limit = os.environ.get("LOCKSTEP_MAX_ISA")
    return levels + (f" (LOCKSTEP_MAX_ISA={limit})" if limit else "")
