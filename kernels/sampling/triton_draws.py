"""Draws of tokens from rows of logits on a GPU: one program a row, over tiles of fixed size (Triton).

Probabilities are counted as integers in units of 2^-60, whose sums do not depend on the order of addition; so a row's
token depends on that row alone, and running sums never decrease. The tokens that a filter keeps are found by bisection
over the order of float32 logits: no row is sorted.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_logprobs import BLOCK_V, NUM_WARPS, SIZES, dense, row_statistics, scaled_tile, selected

_UNITS = tl.constexpr(2.0**60)  # units in a probability of 1; an int64 holds about 2^61 and their rounding errors
_FAR = tl.constexpr(60.0)  # a scaled logit this far below the largest has less than one unit
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64, as in sampling.uniform_noise
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def draw(
    logits: Tensor,
    temperatures: Tensor,
    noise_keys: tuple[Tensor, Tensor],
    filters: tuple[Tensor, Tensor, Tensor],
    reshaped: tuple[Tensor, Tensor] | None,
    allowed: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens: int64 [R], their log-probabilities and chances float32 [R]; see `sampling.draw_tokens`.

    noise_keys: seeds and positions, int64 [R]; filters: top_k int64, top_p float64, min_p float32 [R]. Does not wait
    for the device.
    """
    wanted = logits = dense(logits)
    if reshaped is not None or allowed is not None:
        wanted = _wanted(logits, reshaped, allowed)
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
                BLOCK=BLOCK_V, num_warps=NUM_WARPS,
            )  # fmt: skip
    return token_ids, selected(logits, token_ids, temperatures)[0], chances


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute the noise that `draw` uses, float64 [R]; bit for bit that of `sampling.uniform_noise`."""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        with torch.cuda.device_of(seeds):
            _noise_kernel[(len(seeds),)](seeds.contiguous(), positions.contiguous(), out, num_warps=1)
    return out


def _wanted(logits: Tensor, reshaped: tuple[Tensor, Tensor] | None, allowed: tuple[Tensor, Tensor] | None) -> Tensor:
    """Copy the logits to draw from, in float32."""
    wanted = logits.to(torch.float32, copy=True)
    if reshaped is not None:
        wanted.index_copy_(0, reshaped[0], reshaped[1])
    if allowed is not None:
        rows, masks = allowed
        bits = (masks.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
        bits = bits.flatten(1)[:, : wanted.shape[1]].bool()
        permitted = torch.nn.functional.pad(bits, (0, wanted.shape[1] - bits.shape[1]))
        wanted.index_copy_(0, rows, wanted[rows].masked_fill_(~permitted, -torch.inf))
    return wanted


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
    if top_k == 1:
        token = _first_of_rank(row, vocab_size, temperature, _rank(maximum), top_k, BLOCK)
    else:
        lowest, last_tie = top_k * 0 - (1 << 40), vocab_size  # below all ranks: all tokens are kept
        if (top_k < vocab_size) | (top_p < 1.0):
            mass_limit = tl.where(top_p < 1.0, (top_p * _UNITS).to(tl.int64), 1 << 62)
            lowest, quota = _cut(row, vocab_size, temperature, maximum, log_sum, top_k, mass_limit, BLOCK)
            last_tie = _first_of_rank(row, vocab_size, temperature, lowest, quota, BLOCK)
        least = tl.exp(maximum - maximum - log_sum) * min_p
        noise = _noise(tl.load(seeds_ptr + r), tl.load(positions_ptr + r))
        token = _walk(row, vocab_size, temperature, maximum, log_sum, lowest, last_tie, least, noise, BLOCK)
    token = tl.minimum(token, vocab_size - 1)  # a broken row gets some token
    x = scaled_tile(row, token, vocab_size, temperature)
    tl.store(ids_ptr + r, token.to(tl.int64))
    tl.store(chances_ptr + r, tl.exp(x - maximum - log_sum))


@triton.jit
def _units(x, maximum, log_sum):
    """Return the probability of scaled logits x, in units; 0 where it is NaN."""
    probability = tl.exp(x - maximum - log_sum)
    return (tl.where(probability > 0, probability, 0.0) * _UNITS).to(tl.int64)


@triton.jit
def _rank(x):
    """Map float32 to an int64 of the same order; both zeros have one rank."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _above(row, vocab_size, temperature, maximum, log_sum, rank, BLOCK: tl.constexpr):
    """Count the tokens that rank above `rank`, and sum their units."""
    count = tl.zeros((BLOCK,), tl.int64)
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab_size, BLOCK):
        x = scaled_tile(row, start + tl.arange(0, BLOCK), vocab_size, temperature)
        is_above = _rank(x) > rank
        count += is_above.to(tl.int64)
        mass += tl.where(is_above, _units(x, maximum, log_sum), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _cut(row, vocab_size, temperature, maximum, log_sum, top_k, mass_limit, BLOCK: tl.constexpr):
    """Find the lowest rank that is kept, and the number of tokens kept of that rank: the first ones.

    A rank is kept when fewer than top_k tokens, of no more than mass_limit units together, rank above it.
    """
    low, high = _rank(maximum - _FAR), _rank(maximum)
    while low < high:
        middle = (low + high) >> 1
        count, mass = _above(row, vocab_size, temperature, maximum, log_sum, middle, BLOCK)
        is_kept = (count < top_k) & (mass <= mass_limit)
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle + 1)
    count, mass = _above(row, vocab_size, temperature, maximum, log_sum, low, BLOCK)
    count_with, mass_with = _above(row, vocab_size, temperature, maximum, log_sum, low - 1, BLOCK)
    each = tl.maximum((mass_with - mass) // tl.maximum(count_with - count, 1), 1)
    return low, tl.minimum(top_k - count, (mass_limit - mass) // each + 1)


@triton.jit
def _first_of_rank(row, vocab_size, temperature, rank, nth, BLOCK: tl.constexpr):
    """Find the nth token, from 1, of this rank; V where there are fewer."""
    found = vocab_size
    seen = nth * 0
    start = vocab_size * 0
    while (start < vocab_size) & (seen < nth):
        v = start + tl.arange(0, BLOCK)
        is_it = (_rank(scaled_tile(row, v, vocab_size, temperature)) == rank) & (v < vocab_size)
        running = seen + tl.cumsum(is_it.to(tl.int64), 0)
        found = tl.minimum(found, tl.min(tl.where(is_it & (running >= nth), v, vocab_size), 0))
        seen += tl.sum(is_it.to(tl.int64), 0)
        start += BLOCK
    return found


@triton.jit
def _kept_units(row, v, vocab_size, temperature, maximum, log_sum, lowest, last_tie, least):
    x = scaled_tile(row, v, vocab_size, temperature)
    rank = _rank(x)
    is_kept = (rank > lowest) | ((rank == lowest) & (v <= last_tie))
    is_kept &= tl.exp(x - maximum - log_sum) >= least
    return tl.where(is_kept, _units(x, maximum, log_sum), 0)


@triton.jit
def _walk(
    row, vocab_size, temperature, maximum, log_sum, lowest, last_tie, least, noise, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the first kept token at which the running sum passes noise * total."""
    lanes = tl.arange(0, BLOCK)
    units = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab_size, BLOCK):
        units += _kept_units(row, start + lanes, vocab_size, temperature, maximum, log_sum, lowest, last_tie, least)
    total = tl.sum(units, 0)
    # Rounding may bring the product up to the total, which no running sum passes.
    threshold = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    at = vocab_size * 0
    passed = threshold * 0
    units = _kept_units(row, lanes, vocab_size, temperature, maximum, log_sum, lowest, last_tie, least)
    in_tile = tl.sum(units, 0)
    while passed + in_tile <= threshold:
        passed += in_tile
        at += BLOCK
        units = _kept_units(row, at + lanes, vocab_size, temperature, maximum, log_sum, lowest, last_tie, least)
        in_tile = tl.sum(units, 0)
    running = passed + tl.cumsum(units, 0)
    return tl.min(tl.where(running > threshold, at + lanes, vocab_size), 0)


@triton.jit
def _noise_kernel(seeds_ptr, positions_ptr, out_ptr):
    r = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + r, _noise(tl.load(seeds_ptr + r), tl.load(positions_ptr + r)))


@triton.jit
def _noise(seed, position):
    """Compute float64 in [0, 1) of int64 seed and position: 52 bits, so that the noise is below 1 after rounding."""
    start = _mix(seed.to(tl.uint64) + _GAMMA)
    bits = _mix(start + (position.to(tl.uint64) + 1) * _GAMMA)
    return (bits >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16  # 2^-52


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)
