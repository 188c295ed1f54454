"""Options of launches, and launches that overlap with the end of the kernel before: a decode step is hundreds of them,
of microseconds each.

On Hopper and later GPUs a kernel may be launched while the one before still runs (programmatic dependent launch, CUDA
programming guide): it computes its indices, fetches weights into the L2 cache, and waits before its first other access
to memory until the kernel before has ended, which has waited likewise for the one before it. So no result changes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .triton_numbers import INTERPRETED

UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}  # else the compiler makes one rounding of a product and a sum
_LEAST_CAPABILITY = 90  # compute capability 9.0


@cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """Return the options of a launch on this device, of a kernel that calls `wait_for_inputs` first."""
    if INTERPRETED.value:
        return {"IS_EARLY": False}
    target = triton.runtime.driver.active.get_current_target()
    is_early = target.backend == "cuda" and target.arch >= _LEAST_CAPABILITY and hasattr(tl.extra.cuda, "gdc_wait")
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}


@triton.jit
def wait_for_inputs(IS_EARLY: tl.constexpr):
    """Let the next kernel be launched, and wait for all earlier kernels' writes. Every program of a kernel calls it
    before it reads or writes memory, also one that has nothing to do."""
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch(lines, IS_EARLY: tl.constexpr):
    """Begin to bring lines of 128 bytes, which pointers name, into the L2 cache. It holds what is written meanwhile."""
    if IS_EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )
