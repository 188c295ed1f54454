"""One pass over rows of logits on a GPU (Triton): for their log-probabilities, and for the token of the largest score.

A row is divided into segments of a fixed number of tokens, counted from the first. One program reads one segment, in
tiles of fixed size: each lane keeps its own running maximum and sum, and the lanes are combined once, at the end. What
the segments found is folded by maxima and sums of integers, which have the same bits in any order. So a row's bits
depend on that row alone. One binary serves draws and the trainer, which wants the statistics only: both get the same
bits.

Letters: R rows, V vocabulary, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_launches import UNFUSED
from ..machine.triton_numbers import INTERPRETED, widened
from .triton_noise import gumbel_noise, noise_word, row_key

BLOCK_V = 1024  # tokens of a tile, and lanes of a program
SEGMENT_V = 8192
FEWER_V = 256  # tokens that get an exact score at a time
NUM_WARPS = 8
_MOST_REGISTERS = 64  # a thread: a processor of a Hopper GPU then holds four programs
# Not specialised by the compiler, and neither are alignments: logits that start elsewhere in memory would get another
# layout of lanes, and so another order of addition.
SIZES = ["vocab_size", "logits_row", "temperature_step"]
UNITS = tl.constexpr(2.0**40)  # reference.MASS_UNITS: sums of up to 2^22 numbers up to 1, as integers
LEVELS = tl.constexpr(3)  # of histograms for top_k and top_p (triton_cut.py), each of
BINS = tl.constexpr(2048)  # numbers of tokens and their masses
# What a segment's program reports, float64 [R, COLUMNS, S]: the maximum of logits / temperature and the sum of exp(x -
# maximum) of these x; of a draw also the largest logit (NaN if one is) and its first token, and the largest score (two
# numbers) and its token.
COLUMNS = tl.constexpr(7)
_MARGIN = tl.constexpr(1.0001)  # covers the errors of bounds in float32
_FIRST_BAR = tl.constexpr(0.0247)  # exp(-3.7): the noise of the largest logit is above -3.7
_LEAST_BOUND = tl.constexpr(5.551115123125783e-17)  # 2^-54: less than any number that a noise is made of


@dataclass(frozen=True)
class Drawing:
    """The settings with which a scan draws from R rows, and memory that it prepares for the cut of top_k and top_p."""

    seeds: Tensor  # int64
    positions: Tensor  # int64
    top_k: Tensor  # int64
    top_p: Tensor  # float64
    bins: Tensor  # int64 [R, LEVELS, 2, BINS]; level 0 becomes zeros in rows that have a cut


def statistics(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute the statistics of logits [R, V] at temperatures float32 [R] or [1] -> float32 [R, 2].

    They are the maximum m of x = logits / temperature, and log(sum(exp(x - m))).
    """
    parts = scan(logits, temperatures, None)
    out = torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)
    if len(logits):
        with torch.cuda.device_of(logits):
            _fold_kernel[(len(logits),)](parts, parts.shape[2], out, WIDTH=width_of(parts), num_warps=1, **UNFUSED)
    return out


def scan(logits: Tensor, temperatures: Tensor, drawing: Drawing | None) -> Tensor:
    """Read the segments of logits [R, V], and draw from each without filters -> float64 [R, COLUMNS, S].

    Without `drawing`, nothing is drawn.
    """
    num_rows, vocab_size = logits.shape
    num_segments = triton.cdiv(vocab_size, SEGMENT_V)
    parts = torch.empty(num_rows, COLUMNS.value, num_segments, dtype=torch.float64, device=logits.device)
    if num_rows:
        unread = torch.empty(1, dtype=torch.int64, device=logits.device)
        given = drawing or Drawing(unread, unread, unread, unread.view(torch.float64), unread)
        with torch.cuda.device_of(logits):
            _scan_kernel[(num_rows, num_segments)](
                *(logits, temperatures.contiguous(), vocab_size, logits.stride(0), step_of(temperatures)),
                *(int(drawing is not None), given.seeds, given.positions, given.top_k, given.top_p, parts, given.bins),
                BLOCK=BLOCK_V, SEGMENT=SEGMENT_V, FEWER=FEWER_V,
                num_warps=NUM_WARPS, maxnreg=_MOST_REGISTERS, **UNFUSED,
            )  # fmt: skip
    return parts


def width_of(parts: Tensor) -> int:
    """Return the number of lanes that fold the segments of a row."""
    return triton.next_power_of_2(parts.shape[2])


def dense(logits: Tensor) -> Tensor:
    """Return logits [R, V] with contiguous rows. Raises ValueError where Triton does not serve them."""
    if not logits.is_floating_point() or not (logits.is_cuda or INTERPRETED.value):
        raise ValueError(f"Triton reads floating-point logits on a GPU, not {logits.dtype} on {logits.device}")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def step_of(temperatures: Tensor) -> int:
    """Return the stride between rows' temperatures: 0 where one serves all rows."""
    return temperatures.stride(0) if len(temperatures) > 1 else 0


@triton.jit
def raw_tile(row, v, vocab_size):
    """Load the logits of tokens v of a row in float32; -inf beyond V."""
    return widened(tl.load(row + v, mask=v < vocab_size, other=-float("inf")))


@triton.jit
def scaled_tile(row, v, vocab_size, temperature):
    """Load the logits of tokens v of a row, divided by the temperature; -inf beyond V."""
    return tl.div_rn(raw_tile(row, v, vocab_size), temperature)


@triton.jit
def better(v, x, is_able, scale, vocab_size, a, b, c, d, best_high, best_low, token):
    """Return the best score, as two float64, and its token: the former ones, or the best of able tokens v, logits x.

    The score is the exact sum of x / scale and the noise, by Knuth's TwoSum; of equal scores the first token wins.
    """
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
    return tl.where(is_better, high_here, best_high), best_low, token


@triton.jit
def noise_bound(v, a, b):
    """Return a number u for each token of which the noise is at most -log(u)."""
    return (noise_word(v, a, b) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def may_win(v, z, bar, a, b):
    """Return which tokens may have the best score. z: scaled logits less a reference; bar: exp(best - reference).

    A token whose noise is bounded by -log(u) loses if u * bar is above its own exp(z).
    """
    return noise_bound(v, a, b) * bar <= tl.exp(z) * _MARGIN


@triton.jit
def bar_of(best_high, reference):
    """Compute exp(best - reference) of a score and a scaled logit, at least what the noise of that logit reaches."""
    return tl.maximum(tl.exp((best_high - reference).to(tl.float32)), _FIRST_BAR)


@triton.jit
def has_cut(top_k, top_p, vocab_size):
    """Return whether a row has a top_k or top_p that may remove tokens; top_k = 1 needs no cut."""
    return (top_k != 1) & ((top_k < vocab_size) | (top_p < 1.0))


@triton.jit(
    do_not_specialize=[*SIZES, "draws"],
    do_not_specialize_on_alignment=[
        "logits_ptr", "temperatures_ptr", "seeds_ptr", "positions_ptr", "top_k_ptr", "top_p_ptr", "bins_ptr",
    ],
)  # fmt: skip
def _scan_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, draws, seeds_ptr, positions_ptr,
    top_k_ptr, top_p_ptr, parts_ptr, bins_ptr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, FEWER: tl.constexpr,
):  # fmt: skip
    """Read one segment of a row once; the few that do not tell their winner in this way are read again.

    A token's bid is exp(its scaled logit) / u, where -log(u) bounds its noise. Each lane keeps its two highest bids.
    The tokens of the highest ones get an exact score; the best of them wins if all second bids are below its score.
    """
    r, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits_ptr + r * logits_row
    temperature = tl.load(temperatures_ptr + r * temperature_step)
    seed, position = (tl.load(seeds_ptr + r, mask=draws > 0, other=0),
                      tl.load(positions_ptr + r, mask=draws > 0, other=0))  # fmt: skip
    a, b, c, d = row_key(seed, position)
    top_k = tl.load(top_k_ptr + r, mask=draws > 0, other=1)
    top_p = tl.load(top_p_ptr + r, mask=draws > 0, other=1.0)
    lanes = tl.full((BLOCK,), -float("inf"), tl.float32)  # the largest scaled logit of each lane
    total = tl.zeros((BLOCK,), tl.float32)
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)  # the largest logit of each lane, and its first token
    firsts = tl.zeros((BLOCK,), tl.int32)
    bids = tl.zeros((BLOCK,), tl.float32)  # relative to exp of the lane's maximum
    seconds = tl.zeros((BLOCK,), tl.float32)
    tokens = tl.zeros((BLOCK,), tl.int32)  # of the highest bids, and their logits
    logits = tl.zeros((BLOCK,), tl.float32)
    begin = s * SEGMENT
    end = tl.minimum(begin + SEGMENT, vocab_size)
    ahead = raw_tile(row, begin + tl.arange(0, BLOCK), end)  # the next tile is read while one is summed
    for start in range(begin, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        raw = ahead
        ahead = raw_tile(row, v + BLOCK, end)
        x = tl.div_rn(raw, temperature)
        previous = lanes
        lanes = tl.maximum(previous, x)
        base = tl.where(lanes == -float("inf"), 0.0, lanes)  # a lane that has seen only -inf stays at 0
        shrunk = tl.exp(previous - base)
        share = tl.exp(x - base)
        total = total * shrunk + share
        if draws > 0:
            is_top = (raw > tops) | (raw != raw)
            tops = tl.where(is_top, raw, tops)
            firsts = tl.where(is_top, v, firsts)
            if top_k != 1:
                bid = share / tl.maximum(noise_bound(v, a, b), _LEAST_BOUND)
                bids *= shrunk
                is_higher = bid > bids
                seconds = tl.maximum(seconds * shrunk, tl.minimum(bid, bids))
                bids = tl.maximum(bid, bids)
                tokens = tl.where(is_higher, v, tokens)
                logits = tl.where(is_higher, raw, logits)
    maximum = tl.max(lanes, 0)
    shares = tl.exp(lanes - tl.where(maximum == -float("inf"), 0.0, maximum))
    num_segments = tl.num_programs(1)
    part = parts_ptr + r * COLUMNS * num_segments + s
    tl.store(part, maximum.to(tl.float64))
    tl.store(part + num_segments, tl.sum(total * shares, 0).to(tl.float64))
    if draws > 0:
        top = tl.max(tops, 0)
        first = tl.min(tl.where(tops == top, firsts, vocab_size), 0)
        is_sound = (tl.max((tops != tops).to(tl.int32), 0) == 0) & (top < float("inf"))
        scale = temperature.to(tl.float64)
        best_high = scale * 0.0 - float("inf")
        best_low = scale * 0.0
        token = vocab_size * 0
        if is_sound & (top > -float("inf")) & (top_k != 1):
            bid, second, v, raw = _fewer(bids * shares, seconds * shares, tokens, logits, BLOCK, FEWER)
            best_high, best_low, token = better(
                v, raw, bid > 0.0, scale, vocab_size, a, b, c, d, best_high, best_low, token
            )
            reference = top.to(tl.float64) / scale
            size = tl.abs(maximum)  # scaled logits are rounded: bids are wrong in proportion to their size
            reached = tl.exp((best_high - reference).to(tl.float32))
            is_behind = second * (size * 1e-6 + 1.001) < reached
            if (tl.min(is_behind.to(tl.int32), 0) == 0) | (size >= 1e5):
                inverse = tl.div_rn(temperature * 0.0 + 1.0, temperature)
                for start in range(begin, end, FEWER):
                    v = start + tl.arange(0, FEWER)
                    raw = raw_tile(row, v, end)
                    is_able = may_win(v, (raw - top) * inverse, bar_of(best_high, reference), a, b)
                    is_able &= raw > -float("inf")
                    if tl.max(is_able.to(tl.int32), 0) > 0:
                        best_high, best_low, token = better(
                            v, raw, is_able, scale, vocab_size, a, b, c, d, best_high, best_low, token
                        )
        tl.store(part + 2 * num_segments, tl.where(is_sound, top, float("nan")).to(tl.float64))
        tl.store(part + 3 * num_segments, first.to(tl.float64))
        tl.store(part + 4 * num_segments, best_high)
        tl.store(part + 5 * num_segments, best_low)
        tl.store(part + 6 * num_segments, token.to(tl.float64))
        if (s == 0) & has_cut(top_k, top_p, vocab_size):
            clear(bins_ptr + r * LEVELS * 2 * BINS)


@triton.jit
def _fewer(bids, seconds, tokens, logits, BLOCK: tl.constexpr, FEWER: tl.constexpr):
    """Combine lanes, so that fewer tokens need an exact score: the highest bid of several lanes, and the next one."""
    bids = tl.reshape(bids, (BLOCK // FEWER, FEWER))
    tokens = tl.reshape(tokens, (BLOCK // FEWER, FEWER))
    highest = tl.max(bids, 0)
    token = tl.min(tl.where(bids == highest[None, :], tokens, 0x7FFFFFFF), 0)
    is_it = (bids == highest[None, :]) & (tokens == token[None, :])
    logit = tl.max(tl.where(is_it, tl.reshape(logits, (BLOCK // FEWER, FEWER)), -float("inf")), 0)
    others = tl.maximum(tl.where(is_it, 0.0, bids), tl.reshape(seconds, (BLOCK // FEWER, FEWER)))
    return highest, tl.max(others, 0), token, logit


@triton.jit
def clear(bins):
    """Set the histograms of one level to zeros."""
    tl.store(bins + tl.arange(0, 2 * BINS), tl.zeros((2 * BINS,), tl.int64))


@triton.jit(do_not_specialize=["num_segments"])
def _fold_kernel(parts_ptr, num_segments, stats_ptr, WIDTH: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    maximum, log_sum = folded_statistics(parts_ptr + r * COLUMNS * num_segments, num_segments, WIDTH)
    tl.store(stats_ptr + 2 * r, maximum)
    tl.store(stats_ptr + 2 * r + 1, log_sum)


@triton.jit
def folded_statistics(parts, num_segments, WIDTH: tl.constexpr):
    """Compute the statistics of a row from its segments. The sum is one of integers: their order does not matter."""
    s = tl.arange(0, WIDTH)
    maxima = tl.load(parts + s, mask=s < num_segments, other=-float("inf")).to(tl.float32)
    totals = tl.load(parts + num_segments + s, mask=s < num_segments, other=0.0).to(tl.float32)
    maximum = tl.max(maxima, 0)
    sums = totals * tl.exp(maxima - tl.where(maximum == -float("inf"), 0.0, maximum))
    is_broken = tl.max((sums != sums).to(tl.int32), 0) > 0
    units = tl.sum((tl.where(sums == sums, sums, 0.0).to(tl.float64) * UNITS).to(tl.int64), 0)
    log_sum = tl.log((units.to(tl.float64) / UNITS).to(tl.float32))
    return maximum, tl.where(is_broken, float("nan"), log_sum)


@triton.jit
def folded_top(parts, num_segments, WIDTH: tl.constexpr):
    """Find the largest logit of a row; NaN in a row with NaN or inf, or with -inf alone."""
    s = tl.arange(0, WIDTH)
    tops = tl.load(parts + 2 * num_segments + s, mask=s < num_segments, other=-float("inf")).to(tl.float32)
    top = tl.max(tops, 0)
    is_sound = (tl.max((tops != tops).to(tl.int32), 0) == 0) & (top > -float("inf"))
    return tl.where(is_sound, top, float("nan"))


@triton.jit
def folded_first(parts, num_segments, top, WIDTH: tl.constexpr):
    """Find the first token of the largest logit of a row."""
    s = tl.arange(0, WIDTH)
    tops = tl.load(parts + 2 * num_segments + s, mask=s < num_segments, other=-float("inf")).to(tl.float32)
    firsts = tl.load(parts + 3 * num_segments + s, mask=s < num_segments, other=0.0).to(tl.int32)
    return tl.min(tl.where(tops == top, firsts, 0x7FFFFFFF), 0)


@triton.jit
def folded_winner(scores, num_segments, WIDTH: tl.constexpr):
    """Find the token of the largest score of a row. scores: three numbers of each segment, float64 [3, S]."""
    s = tl.arange(0, WIDTH)
    highs = tl.load(scores + s, mask=s < num_segments, other=-float("inf"))
    lows = tl.load(scores + num_segments + s, mask=s < num_segments, other=0.0)
    tokens = tl.load(scores + 2 * num_segments + s, mask=s < num_segments, other=0.0).to(tl.int32)
    is_best = highs == tl.max(highs, 0)
    low = tl.max(tl.where(is_best, lows, -float("inf")), 0)
    return tl.min(tl.where(is_best & (lows == low), tokens, 0x7FFFFFFF), 0)
