"""Ranks and masses of tokens for the filters of draws on a GPU (Triton), and histograms of them.

The histograms of a row have three levels. A token belongs to a bin by its distance from the row's highest rank: level 0
tells its upper 11 bits apart, level 1 the next 11, and level 2 the other 10.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_scan import BINS, UNITS

BITS = tl.constexpr(11)  # of a distance that one level tells apart


@triton.jit
def filter_weights(z):
    """Compute reference.weights."""
    y = tl.maximum(z, -87.3)
    t = y * 1.44269504088896341 + 12582912.0
    n = t - 12582912.0
    r = n * -0.693359375 + y
    r = n * 2.12194440e-4 + r
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * (r * r) + r) + 1.0
    power = ((t.to(tl.int32, bitcast=True) << 23) + (127 << 23)).to(tl.float32, bitcast=True)
    return tl.where(z < -87.3, 0.0, p * power)


@triton.jit
def mass_of(x, largest, inverse):
    """Compute the mass int64 of logits x."""
    return (filter_weights((x - largest) * inverse) * UNITS).to(tl.int64)


@triton.jit
def rank_of(x):
    """Map float32 to an int64 of the same order; both zeros have one rank."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def first_shift(span):
    """Return the number of lower bits of distances below `span`, at most 2^32, that level 0 leaves open."""
    num_bits = (span.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022
    return tl.maximum(num_bits - BITS, 0)


@triton.jit
def add(bins, at, mass, is_in, BLOCK: tl.constexpr):
    """Add tokens to a level's histograms."""
    tl.atomic_add(bins + at, tl.full((BLOCK,), 1, tl.int64), mask=is_in, sem="relaxed")
    tl.atomic_add(bins + BINS + at, mass, mask=is_in & (mass > 0), sem="relaxed")


@triton.jit
def narrowed(bins, count, mass, top_k, limit):
    """Find the last bin that has a kept rank: it, and the count and mass of the tokens above it.

    A rank is kept when fewer than top_k tokens, of no more mass than the limit together, rank above it.
    """
    i = tl.arange(0, BINS)
    num, sums = tl.load(bins + i), tl.load(bins + BINS + i)
    num_above = count + tl.cumsum(num, 0) - num
    mass_above = mass + tl.cumsum(sums, 0) - sums
    found = tl.sum(((num_above < top_k) & (mass_above <= limit)).to(tl.int32), 0) - 1
    is_it = i == found
    count, mass = tl.sum(tl.where(is_it, num_above, 0), 0), tl.sum(tl.where(is_it, mass_above, 0), 0)
    return found.to(tl.int64), count, mass


@triton.jit
def quota_of(top_k, count, mass, each, limit):
    """Compute how many tokens of one rank, of one mass each, are kept after others of this count and mass."""
    room = tl.where(each > 0, (limit - mass) // tl.maximum(each, 1) + 1, top_k)
    return tl.minimum(top_k - count, room)
