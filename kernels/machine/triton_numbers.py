"""Operations that Triton's interpreter gets wrong for bfloat16, corrected; on a GPU they are the plain operations."""

from __future__ import annotations

import triton
import triton.language as tl

# Read when kernels are decorated, so this constant and the mode of the kernels agree.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 x to the nearest value of dtype, ties to even. The interpreter's own cast to bfloat16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot_added(total, a, b):
    """Add a [M, K] @ b [K, N] to total, in total's dtype. The interpreter's products of bfloat16 values are wrong."""
    if INTERPRETED:
        return tl.dot(a.to(total.dtype), b.to(total.dtype), total, input_precision="ieee", out_dtype=total.dtype)
    else:
        return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def widened(x):
    """Convert x to float32. The interpreter's own cast of subnormal bfloat16 gives zeros."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)
