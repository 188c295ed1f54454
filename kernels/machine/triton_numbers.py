"""What Triton's interpreter gets wrong about bfloat16, put right; on a GPU these are the plain operations."""

from __future__ import annotations

import triton
import triton.language as tl

# Decided as kernels are decorated: this module's constant and their mode agree.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x as the nearest value of dtype, ties to even. The interpreter's own cast to bfloat16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot_added(total, a, b):
    """total + a [M, K] @ b [K, N], summed in total's dtype. The interpreter's products of bfloat16 are garbage."""
    if INTERPRETED:
        return tl.dot(a.to(total.dtype), b.to(total.dtype), total, input_precision="ieee", out_dtype=total.dtype)
    else:
        return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
