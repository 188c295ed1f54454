"""The noise of draws on a GPU: the definition of noise.py in Triton.

Kernels that call these functions are compiled without fused products and sums (`enable_fp_fusion=False`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Compute the noise float64 [R, V] of tokens int64 [V], for a comparison with `noise.gumbel_noise`."""
    out = torch.empty(len(seeds), len(token_ids), dtype=torch.float64, device=seeds.device)
    if out.numel():
        with torch.cuda.device_of(seeds):
            _noise_kernel[(len(seeds), triton.cdiv(len(token_ids), 1024))](
                *(seeds.contiguous(), positions.contiguous(), token_ids.contiguous(), len(token_ids), out),
                BLOCK=1024, enable_fp_fusion=False,
            )  # fmt: skip
    return out


@triton.jit
def _noise_kernel(seeds_ptr, positions_ptr, ids_ptr, count, out_ptr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = row_key(tl.load(seeds_ptr + r), tl.load(positions_ptr + r))
    token_ids = tl.load(ids_ptr + i, mask=i < count, other=0)
    tl.store(out_ptr + r * count + i, gumbel_noise(token_ids, a, b, c, d), mask=i < count)


@triton.jit
def row_key(seed, position):
    """Compute the four words, uint32, of the key of a row with int64 seed and position."""
    start = _mixed(seed.to(tl.uint64) + _GAMMA)
    first = _mixed(start + (position.to(tl.uint64) + 1) * _GAMMA)
    second = _mixed(first + _GAMMA)
    return first.to(tl.uint32), (first >> 32).to(tl.uint32), second.to(tl.uint32), (second >> 32).to(tl.uint32)


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def noise_word(token_ids, a, b):
    """Hash token ids with two words of a key: uint32."""
    h = token_ids.to(tl.uint32) + a
    h = (h ^ (h >> 17)) * 0xED5AD4BB
    h = ((h ^ (h >> 11)) + b) * 0xAC4C1B51
    h = (h ^ (h >> 15)) * 0x31848BAB
    return h ^ (h >> 14)


@triton.jit
def gumbel_noise(token_ids, a, b, c, d):
    """Compute the noise float64 of token ids in the row of a key."""
    k = (noise_word(token_ids, a, b).to(tl.int64) << 20) | (noise_word(token_ids, c, d) >> 12).to(tl.int64)
    u = 1.0 - (k.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return -natural_log(-natural_log(u))


@triton.jit
def natural_log(x):
    """Compute noise.natural_log."""
    bits = x.to(tl.int64, bitcast=True)
    high = (bits >> 32) + (0x3FF00000 - 0x3FE6A09E)
    exponent = ((high >> 20) - 0x3FF).to(tl.float64)
    high = (high & 0xFFFFF) + 0x3FE6A09E
    f = ((high << 32) | (bits & 0xFFFFFFFF)).to(tl.float64, bitcast=True) - 1.0
    half_square = 0.5 * f * f
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    odd = z * (
        6.666666666666735130e-01
        + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01))
    )
    out = s * (half_square + (odd + even)) + exponent * 1.90821492927058770002e-10
    return out - half_square + f + exponent * 6.93147180369123816490e-01
