"""The products of a linear layer's backward pass.

On a CPU without AVX512 torch has no fast product in bfloat16: 0.6 to 2 GFLOPS a core where it has 30 to 60 in float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def gradient_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left [M,K] @ right [K,N] -> [M,N] with the library, in the dtype of both; sums are in float32.

    bfloat16 on a CPU that the library has no product for is multiplied in float32 and rounded once.
    """
    if left.dtype is torch.bfloat16 and left.is_cpu and not has_fast_bfloat16():
        return (left.float() @ right.float()).bfloat16()
    return left @ right


@cache
def has_fast_bfloat16() -> bool:
    """Return whether torch multiplies bfloat16 on this CPU with oneDNN."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
