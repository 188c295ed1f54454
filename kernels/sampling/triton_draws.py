"""Draws of tokens from rows of logits on a GPU: one program a row, over tiles of fixed size (Triton).

They follow the definition in reference.py bit for bit: its operations, in its order, unfused (UNFUSED). Bounds of the
noise in float32 tell which tiles have a token that may win; only these get logarithms. The tokens that a filter keeps
are looked for only if it removes the winner, by bisection over the order of float32 logits: no row is sorted.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import widened
from .triton_logprobs import BLOCK_V, NUM_WARPS, SIZES, dense, row_statistics, scaled_tile, selected
from .triton_noise import gumbel_noise, noise_word, row_key
from .wanted import wanted_logits

UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}  # else the compiler makes one rounding of a product and a sum
_UNITS = tl.constexpr(2.0**40)  # reference.MASS_UNITS
_MARGIN = tl.constexpr(1.0001)  # covers the errors of bounds in float32
_FIRST_BAR = tl.constexpr(0.0247)  # exp(-3.7): the noise of the largest logit is above -3.7


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
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    chances = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_k, top_p, min_p = (limit.contiguous() for limit in filters)
    if num_rows:
        with torch.cuda.device_of(logits):
            _draw_kernel[(num_rows,)](
                *(wanted, temperatures.contiguous(), vocab_size, wanted.stride(0), int(len(temperatures) > 1)),
                *(key.contiguous() for key in noise_keys),
                *(top_k, top_p.double(), min_p, token_ids, chances),
                BLOCK=BLOCK_V, num_warps=NUM_WARPS, **UNFUSED,
            )  # fmt: skip
    return token_ids, selected(logits, token_ids, temperatures)[0], chances


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
def _draw_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, seeds_ptr, positions_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, ids_ptr, chances_ptr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    row = logits_ptr + r * logits_row
    temperature = tl.load(temperatures_ptr + r * temperature_step)
    maximum, log_sum = row_statistics(row, vocab_size, temperature, BLOCK)
    top_k, top_p, min_p = tl.load(top_k_ptr + r), tl.load(top_p_ptr + r), tl.load(min_p_ptr + r)
    largest, is_broken = _largest(row, vocab_size, BLOCK)
    inverse = tl.div_rn(temperature * 0.0 + 1.0, temperature)
    token = vocab_size * 0
    if (top_k == 1) & (is_broken == 0):
        token = _first_of_rank(row, vocab_size, _rank(largest), top_k, BLOCK)
    elif is_broken == 0:
        a, b, c, d = row_key(tl.load(seeds_ptr + r), tl.load(positions_ptr + r))
        lowest, last_tie = top_k * 0 - (1 << 40), vocab_size  # below all ranks: all tokens are kept
        token = _winner(
            row, vocab_size, temperature, inverse, largest, lowest, last_tie, min_p * 0.0, a, b, c, d, BLOCK
        )
        mass_limit = top_k * 0 + (1 << 62)
        if top_p < 1.0:
            _, mass = _before(row, vocab_size, inverse, largest, lowest, vocab_size, BLOCK)
            mass_limit = (mass.to(tl.float64) * top_p).to(tl.int64)
        x = _logits(row, token, vocab_size)
        is_kept = _weights((x - largest) * inverse) >= min_p
        has_cut = (top_k < vocab_size) | (top_p < 1.0)
        if has_cut:
            count, mass = _before(row, vocab_size, inverse, largest, _rank(x), token, BLOCK)
            is_kept &= (count < top_k) & (mass <= mass_limit)
        if is_kept == 0:
            if has_cut:
                lowest, quota = _cut(row, vocab_size, inverse, largest, top_k, mass_limit, BLOCK)
                last_tie = _first_of_rank(row, vocab_size, lowest, quota, BLOCK)
            token = _winner(row, vocab_size, temperature, inverse, largest, lowest, last_tie, min_p, a, b, c, d, BLOCK)
    x = scaled_tile(row, token, vocab_size, temperature)
    tl.store(ids_ptr + r, token.to(tl.int64))
    tl.store(chances_ptr + r, tl.exp(x - maximum - log_sum))


@triton.jit
def _logits(row, v, vocab_size):
    return widened(tl.load(row + v, mask=v < vocab_size, other=-float("inf")))


@triton.jit
def _largest(row, vocab_size, BLOCK: tl.constexpr):
    """Find the largest logit of a row, and whether the row has none to draw."""
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x = _logits(row, start + tl.arange(0, BLOCK), vocab_size)
        largest = tl.maximum(largest, x)
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
    found = tl.max(largest, 0)
    return found, tl.max(broken, 0) | (found == -float("inf")).to(tl.int32)


@triton.jit
def _winner(
    row, vocab_size, temperature, inverse, largest, lowest, last_tie, least, a, b, c, d, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the kept token with the largest score, the first of equal ones.

    A token whose noise is bounded by -log(v) loses if v * exp(best - largest scaled logit) is above its own exp(z).
    """
    scale = temperature.to(tl.float64)
    top = largest.to(tl.float64) / scale
    best_high = top * 0.0 - float("inf")
    best_low = top * 0.0
    bar = largest * 0.0 + _FIRST_BAR
    token = vocab_size * 0
    for start in range(0, vocab_size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = _logits(row, v, vocab_size)
        z = (x - largest) * inverse
        rank = _rank(x)
        is_kept = (rank > lowest) | ((rank == lowest) & (v <= last_tie))
        is_kept &= (_weights(z) >= least) & (x > -float("inf"))
        bound = (noise_word(v, a, b) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        is_able = is_kept & (bound * bar <= tl.exp(z) * _MARGIN)
        if tl.max(is_able.to(tl.int32), 0) > 0:
            y = x.to(tl.float64) / scale
            g = gumbel_noise(v, a, b, c, d)
            high = tl.where(is_able, y + g, -float("inf"))
            high_here = tl.max(high, 0)
            back = high - y
            low = tl.where(high == high_here, (y - (high - back)) + (g - back), -float("inf"))
            low_here = tl.max(low, 0)
            first = tl.min(tl.where((high == high_here) & (low == low_here), v, vocab_size), 0)
            is_better = (high_here > best_high) | ((high_here == best_high) & (low_here > best_low))
            token = tl.where(is_better, first, token)
            best_low = tl.where(is_better, low_here, best_low)
            best_high = tl.where(is_better, high_here, best_high)
            reached = tl.exp((best_high - top).to(tl.float32))
            bar = tl.maximum(bar, reached)
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
def _before(row, vocab_size, inverse, largest, rank, token, BLOCK: tl.constexpr):
    """Count the tokens that rank above `rank`, or equal it and come before `token`, and sum their masses."""
    count = tl.zeros((BLOCK,), tl.int64)
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab_size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = _logits(row, v, vocab_size)
        is_before = (v < vocab_size) & ((_rank(x) > rank) | ((_rank(x) == rank) & (v < token)))
        count += is_before.to(tl.int64)
        mass += tl.where(is_before, (_weights((x - largest) * inverse) * _UNITS).to(tl.int64), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _cut(row, vocab_size, inverse, largest, top_k, mass_limit, BLOCK: tl.constexpr):
    """Find the lowest rank that is kept, and the number of tokens kept of that rank: the first ones.

    A rank is kept when fewer than top_k tokens, of no more than mass_limit together, rank above it.
    """
    low, high = _rank(largest * 0.0 - float("inf")), _rank(largest)
    while low < high:
        middle = (low + high) >> 1
        count, mass = _before(row, vocab_size, inverse, largest, middle, 0, BLOCK)
        is_kept = (count < top_k) & (mass <= mass_limit)
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle + 1)
    count, mass = _before(row, vocab_size, inverse, largest, low, 0, BLOCK)
    count_with, mass_with = _before(row, vocab_size, inverse, largest, low - 1, 0, BLOCK)
    each = (mass_with - mass) // tl.maximum(count_with - count, 1)
    room = tl.where(each > 0, (mass_limit - mass) // tl.maximum(each, 1) + 1, top_k)
    return low, tl.minimum(top_k - count, room)


@triton.jit
def _first_of_rank(row, vocab_size, rank, nth, BLOCK: tl.constexpr):
    """Find the nth token, from 1, of this rank; V where there are fewer."""
    found = vocab_size
    seen = nth * 0
    start = vocab_size * 0
    while (start < vocab_size) & (seen < nth):
        v = start + tl.arange(0, BLOCK)
        is_it = (_rank(_logits(row, v, vocab_size)) == rank) & (v < vocab_size)
        running = seen + tl.cumsum(is_it.to(tl.int64), 0)
        found = tl.minimum(found, tl.min(tl.where(is_it & (running >= nth), v, vocab_size), 0))
        seen += tl.sum(is_it.to(tl.int64), 0)
        start += BLOCK
    return found
