"""The noise of draws: one Gumbel number per (seed, position, token id), computed alike on every path.

Nothing is drawn one after another: a number follows from its three coordinates. All steps are operations on integers,
or single IEEE operations in float64, in the order in which they stand here; no product and sum are fused. So
PyTorch, C++ and Triton compute the same bits.

- Key of a row: the stream of `seed` in SplitMix64 (Steele, Lea, Flood 2014), started at the mixed seed, read at
  `position`, and mixed once more: twice 64 bits, that is, four words of 32 bits.
- Word of a token: `noise_word` of its id and two words of the key, the rounds of "triple32" (C. Wellons,
  hash-prospector) with the second word added between them. The first word of a token decides nearly always; the
  second one, from the other two words of the key, refines it.
- v = (k + 1/2) / 2^52, where k has the 32 bits of the first word and the upper 20 of the second one.
- g = -log(-log(1 - v)), with the logarithm of fdlibm (Sun Microsystems, as in musl's log.c). A small v is a large g: v
  is never 0, and the smallest are 2^-53, so that a token of probability 1e-9 wins as often as it should, to 7 digits.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the golden-ratio increment of SplitMix64
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_LOG2_HIGH, _LOG2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_SERIES = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute the four words of each row's key, int32 [4, R], from seeds and positions, int64 [R] each."""
    first = mixed(mixed(seeds + GAMMA) + (positions + 1) * GAMMA)
    second = mixed(first + GAMMA)
    return torch.stack([first, first >> 32, second, second >> 32]).to(torch.int32)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Compute the noise float64 [...] of token ids [...] in rows with these keys [4, ...]; shapes broadcast."""
    a, b, c, d = keys
    k = (noise_word(token_ids, a, b).long() & 0xFFFFFFFF) << 20
    k = k | ((noise_word(token_ids, c, d).long() >> 12) & 0xFFFFF)
    u = 1.0 - (k.double() + 0.5) * 2.0**-52
    return -natural_log(-natural_log(u))


def noise_word(token_ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Hash token ids with two words of a key, int32, to a word of 32 bits. Products wrap around as unsigned ones do."""
    h = token_ids.to(torch.int32) + a
    h = _folded(h, 17).mul_(0xED5AD4BB - 2**32)
    h = _folded(h, 11).add_(b).mul_(0xAC4C1B51 - 2**32)
    h = _folded(h, 15).mul_(0x31848BAB)
    return _folded(h, 14)


def _folded(h: Tensor, bits: int) -> Tensor:
    """Compute h ^ (h >> bits) of int32, zeros shifted in."""
    return (h >> bits).bitwise_and_((1 << (32 - bits)) - 1).bitwise_xor_(h)


def natural_log(x: Tensor) -> Tensor:
    """Compute the logarithm of normal positive float64, to less than 1 ulp, in IEEE operations of a fixed order."""
    bits = x.view(torch.int64)
    high = (bits >> 32) + (0x3FF00000 - 0x3FE6A09E)
    exponent = ((high >> 20) - 0x3FF).double()
    high = (high & 0xFFFFF) + 0x3FE6A09E  # of x / 2^exponent, from sqrt(1/2) to sqrt(2)
    f = ((high << 32) | (bits & 0xFFFFFFFF)).view(torch.float64) - 1.0
    half_square = 0.5 * f * f
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    c1, c2, c3, c4, c5, c6, c7 = _SERIES
    even = w * (c2 + w * (c4 + w * c6))
    odd = z * (c1 + w * (c3 + w * (c5 + w * c7)))
    return s * (half_square + (odd + even)) + exponent * _LOG2_LOW - half_square + f + exponent * _LOG2_HIGH


def mixed(z: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64, whose products wrap around as unsigned ones do."""
    z = (z ^ _shifted(z, 30)) * MIX_1
    z = (z ^ _shifted(z, 27)) * MIX_2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right, zeros first."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
