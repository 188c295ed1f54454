"""Draws of tokens from rows of logits on a GPU: one program a row, over tiles of fixed size (Triton).

They follow the definition in reference.py bit for bit: its operations, in its order, unfused (UNFUSED). One pass finds
the winner of all tokens, and what its log-probability follows from (`triton_scan.py`). Where a row has top_k or top_p,
three passes find the exact cut: counts and masses of the tokens by 11, 11 and 10 bits of their rank, all integers, so
that no order of addition matters. Only where a filter removes the winner does a fifth pass draw again among those that
are kept. No row is sorted.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_logprobs import logprobs_of
from .triton_noise import row_key
from .triton_scan import (
    BLOCK_V,
    NUM_WARPS,
    SIZES,
    UNFUSED,
    bar_of,
    better,
    dense,
    may_win,
    raw_tile,
    scaled_tile,
    scan,
    statistics,
    step_of,
)
from .wanted import wanted_logits

MOST_PASSES = 5  # over a row's logits
_UNITS = tl.constexpr(2.0**40)  # reference.MASS_UNITS
_BITS = tl.constexpr(11)  # of a rank that one pass tells apart
_BINS = tl.constexpr(2048)
_LEVELS = tl.constexpr(3)


def draw(
    logits: Tensor,
    temperatures: Tensor,
    noise_keys: tuple[Tensor, Tensor],
    filters: tuple[Tensor, Tensor, Tensor],
    reshaped: tuple[Tensor, Tensor] | None,
    allowed: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens: int64 [R], their log-probabilities and chances float32 [R]; see `draws.draw_tokens`.

    noise_keys: seeds and positions, int64 [R]; filters: top_k int64, top_p float64, min_p float32 [R]. Does not wait
    for the device.
    """
    wanted = logits = dense(logits)
    if reshaped is not None or allowed is not None:
        wanted = wanted_logits(logits, reshaped, allowed)
    num_rows, vocab_size = logits.shape
    found = scan(wanted, temperatures, noise_keys)
    chances = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_k, top_p, min_p = (limit.contiguous() for limit in filters)
    if num_rows:
        counts, masses = (torch.empty(num_rows, _LEVELS.value, _BINS.value, dtype=dtype, device=logits.device)
                          for dtype in (torch.int32, torch.int64))  # fmt: skip
        with torch.cuda.device_of(logits):
            _choose_kernel[(num_rows,)](
                *(wanted, temperatures.contiguous(), vocab_size, wanted.stride(0), step_of(temperatures)),
                *(key.contiguous() for key in noise_keys),
                *(top_k, top_p.double(), min_p, found.statistics, found.largest, counts, masses),
                *(found.winners, chances),
                BLOCK=BLOCK_V, num_warps=NUM_WARPS, **UNFUSED,
            )  # fmt: skip
    stats = found.statistics if wanted is logits else statistics(logits, temperatures)
    columns = found.winners.unsqueeze(-1)
    return found.winners, logprobs_of(logits, temperatures, stats, columns).squeeze(-1), chances


def weights(z: Tensor) -> Tensor:
    """Compute the filters' weights of float32 z [N], for a comparison with `reference.weights`."""
    out = torch.empty_like(z)
    with torch.cuda.device_of(z):
        _weights_kernel[(triton.cdiv(len(z), 1024),)](z.contiguous(), len(z), out, BLOCK=1024, **UNFUSED)
    return out


@triton.jit
def _weights_kernel(z_ptr, count, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, _weights(tl.load(z_ptr + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["logits_ptr"])
def _choose_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, seeds_ptr, positions_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, stats_ptr, largest_ptr, counts_ptr, masses_ptr, ids_ptr, chances_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace a row's winner by the one that its filters keep; a row without filters is not read again."""
    r = tl.program_id(0).to(tl.int64)
    row = logits_ptr + r * logits_row
    temperature = tl.load(temperatures_ptr + r * temperature_step)
    top_k, top_p, min_p = tl.load(top_k_ptr + r), tl.load(top_p_ptr + r), tl.load(min_p_ptr + r)
    largest = tl.load(largest_ptr + r)
    token = tl.load(ids_ptr + r).to(tl.int32)
    is_sound = largest == largest
    if is_sound & (top_k == 1):
        token = _first_of_rank(row, vocab_size, _rank(largest), BLOCK)
    elif is_sound:
        inverse = tl.div_rn(temperature * 0.0 + 1.0, temperature)
        lowest, quota = top_k * 0 - (1 << 40), top_k  # below all ranks: all tokens are kept
        x = raw_tile(row, token, vocab_size)
        is_kept = _weights((x - largest) * inverse) >= min_p
        if (top_k < vocab_size) | (top_p < 1.0):
            lowest, quota, num_ties = _cut(
                row, vocab_size, inverse, largest, top_k, top_p, counts_ptr + r * _LEVELS * _BINS,
                masses_ptr + r * _LEVELS * _BINS, BLOCK,
            )  # fmt: skip
            is_kept &= (_rank(x) > lowest) | ((_rank(x) == lowest) & (quota >= num_ties))
        if is_kept == 0:
            a, b, c, d = row_key(tl.load(seeds_ptr + r), tl.load(positions_ptr + r))
            token = _winner(row, vocab_size, temperature, inverse, largest, lowest, quota, min_p, a, b, c, d, BLOCK)
    x = scaled_tile(row, token, vocab_size, temperature)
    tl.store(ids_ptr + r, token.to(tl.int64))
    tl.store(chances_ptr + r, tl.exp(x - tl.load(stats_ptr + 2 * r) - tl.load(stats_ptr + 2 * r + 1)))


@triton.jit
def _winner(
    row, vocab_size, temperature, inverse, largest, lowest, quota, least, a, b, c, d, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the kept token with the largest score: those above the lowest rank, and the first `quota` ones of it."""
    scale = temperature.to(tl.float64)
    top = largest.to(tl.float64) / scale
    best_high = top * 0.0 - float("inf")
    best_low = top * 0.0
    token = vocab_size * 0
    seen = quota * 0
    for start in range(0, vocab_size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = raw_tile(row, v, vocab_size)
        z = (x - largest) * inverse
        rank = _rank(x)
        is_tie = (rank == lowest) & (v < vocab_size)
        running = seen + tl.cumsum(is_tie.to(tl.int64), 0)
        is_kept = (rank > lowest) | (is_tie & (running <= quota))
        seen += tl.sum(is_tie.to(tl.int64), 0)
        is_able = is_kept & (_weights(z) >= least) & (x > -float("inf")) & may_win(v, z, bar_of(best_high, top), a, b)
        if tl.max(is_able.to(tl.int32), 0) > 0:
            best_high, best_low, token = better(
                v, x, is_able, scale, vocab_size, a, b, c, d, best_high, best_low, token
            )
    return token


@triton.jit
def _weights(z):
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
def _rank(x):
    """Map float32 to an int64 of the same order; both zeros have one rank."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _cut(row, vocab_size, inverse, largest, top_k, top_p, counts, masses, BLOCK: tl.constexpr):
    """Find the lowest rank that is kept, the number of tokens kept of that rank, and the number that have it.

    A rank is kept when fewer than top_k tokens, of no more than top_p's share of the mass together, rank above it.
    counts and masses: memory for [3, 2048] numbers.
    """
    bins = tl.arange(0, _BINS)
    prefix = top_k * 0  # the upper bits of the lowest kept rank, as far as they are known
    count, mass = top_k * 0, top_k * 0  # of the tokens that rank above all with this prefix
    num_ties, mass_of_ties = top_k * 0, top_k * 0
    mass_limit = top_k * 0 + (1 << 62)
    for level in range(_LEVELS):
        shift = tl.maximum(32 - _BITS * (level + 1), 0)  # 21, 10, 0
        width = tl.minimum(32 - _BITS * level, _BITS)  # 11, 11, 10
        tl.store(counts + level * _BINS + bins, tl.zeros((_BINS,), tl.int32))
        tl.store(masses + level * _BINS + bins, tl.zeros((_BINS,), tl.int64))
        tl.debug_barrier()
        for start in range(0, vocab_size, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = raw_tile(row, v, vocab_size)
            key = _rank(x) + (1 << 31)
            is_in = (v < vocab_size) & ((key >> (shift + width)) == prefix)
            at = level * _BINS + ((key >> shift) & ((1 << width) - 1)).to(tl.int32)
            weight = (_weights((x - largest) * inverse) * _UNITS).to(tl.int64)
            tl.atomic_add(counts + at, tl.full((BLOCK,), 1, tl.int32), mask=is_in, sem="relaxed")
            tl.atomic_add(masses + at, weight, mask=is_in & (weight > 0), sem="relaxed")
        tl.debug_barrier()
        num = tl.load(counts + level * _BINS + bins, cache_modifier=".cg").to(tl.int64)
        sums = tl.load(masses + level * _BINS + bins, cache_modifier=".cg")
        share = (tl.sum(sums, 0).to(tl.float64) * top_p).to(tl.int64)
        mass_limit = tl.where((level == 0) & (top_p < 1.0), share, mass_limit)
        num_above = count + tl.sum(num, 0) - tl.cumsum(num, 0)
        mass_above = mass + tl.sum(sums, 0) - tl.cumsum(sums, 0)
        is_kept = (num_above < top_k) & (mass_above <= mass_limit)
        found = tl.min(tl.where(is_kept, bins, _BINS - 1), 0)
        count = tl.sum(tl.where(bins == found, num_above, 0), 0)
        mass = tl.sum(tl.where(bins == found, mass_above, 0), 0)
        num_ties = tl.sum(tl.where(bins == found, num, 0), 0)
        mass_of_ties = tl.sum(tl.where(bins == found, sums, 0), 0)
        prefix = (prefix << width) | found.to(tl.int64)
    each = mass_of_ties // tl.maximum(num_ties, 1)
    room = tl.where(each > 0, (mass_limit - mass) // tl.maximum(each, 1) + 1, top_k)
    return prefix - (1 << 31), tl.minimum(top_k - count, room), num_ties


@triton.jit
def _first_of_rank(row, vocab_size, rank, BLOCK: tl.constexpr):
    """Find the first token of this rank; V where there is none."""
    found = vocab_size
    start = vocab_size * 0
    while (start < vocab_size) & (found == vocab_size):
        v = start + tl.arange(0, BLOCK)
        is_it = (_rank(raw_tile(row, v, vocab_size)) == rank) & (v < vocab_size)
        found = tl.minimum(found, tl.min(tl.where(is_it, v, vocab_size), 0))
        start += BLOCK
    return found
