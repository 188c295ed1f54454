"""The cut of top_k and top_p on a GPU, and the draw among the kept tokens where a filter removes a row's winner.

No row is sorted. A first pass over the segments of a row counts the tokens that rank above its winner, and their mass:
this tells whether the filters keep the winner. Where they do not, the cut is above it, and histograms of the tokens
above it find the lowest kept rank: counts and masses by 11, 11 and 10 bits of their distance from the highest rank, the
first of them in the same first pass. All are integers, so that no order of addition matters, and what one launch adds
up the next one reads. A last pass draws again. Rows whose winner is kept return from all passes but the first at once,
and rows without a cut from that one too.

Letters: R rows, V vocabulary, S segments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_launches import UNFUSED
from .triton_noise import row_key
from .triton_ranks import BITS, add, filter_weights, first_shift, mass_of, narrowed, quota_of, rank_of
from .triton_scan import (
    BINS,
    BLOCK_V,
    COLUMNS,
    LEVELS,
    NUM_WARPS,
    SEGMENT_V,
    SIZES,
    Drawing,
    bar_of,
    better,
    clear,
    folded_top,
    folded_winner,
    has_cut,
    may_win,
    raw_tile,
    step_of,
    width_of,
)

_LAST_BINS = tl.constexpr(1024)  # of level 2
_BELOW_ALL = tl.constexpr(-(2**31) - 1)  # a rank
# What is known of a row's cut, int64 [R, 3, 4]. First the verdict: its state (0: the winner is kept; 1: it is not, the
# cut is known; 2: the cut is above the winner's rank), the lowest kept rank (in state 2 the rank below which it is not
# searched), the number of tokens kept of that rank, and the limit of mass. Then what level 0 and level 1 say: the upper
# bits of the cut's distance, and the count and mass of the tokens that rank above all of that distance.
VERDICT = tl.constexpr(12)
# The sums of a segment, int64 [R, 4, S]: count and mass of the tokens above the winner's rank, the number of tokens of
# its rank with lower ids, and the mass of all.
_SUMS = tl.constexpr(4)


def draw_again(
    logits: Tensor, temperatures: Tensor, min_p: Tensor, drawing: Drawing, parts: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw again from the rows of logits [R, V] whose winner a filter removes. parts: of the scan.

    Return the verdicts int64 [R, 12], of which the first number is 0 in the other rows, and the scores float64
    [R, 3, S] for `folded_winner`.
    """
    num_rows, _, num_segments = parts.shape
    verdicts, sums, ties = (
        torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)
        for *shape, dtype in (
            (VERDICT.value, torch.int64), (_SUMS.value, num_segments, torch.int64),
            (num_segments, _LAST_BINS.value, torch.int32),
        )
    )  # fmt: skip
    scores = torch.empty(num_rows, 3, num_segments, dtype=torch.float64, device=logits.device)
    rows = (logits, temperatures.contiguous(), logits.shape[1], logits.stride(0), step_of(temperatures))
    filters = (drawing.top_k, drawing.top_p, min_p)
    memory = (parts, drawing.bins, sums, ties, verdicts)
    grid = (num_rows, num_segments)
    options = {"BLOCK": BLOCK_V, "SEGMENT": SEGMENT_V, "WIDTH": width_of(parts), "num_warps": NUM_WARPS, **UNFUSED}
    with torch.cuda.device_of(logits):
        _first_level_kernel[grid](*rows, *filters, *memory, **options)
        for level in (1, 2):
            _next_level_kernel[grid](*rows, *filters, *memory, LEVEL=level, **options)
        _again_kernel[grid](*rows, *filters, *memory, drawing.seeds, drawing.positions, scores, **options)
    return verdicts, scores


_PLACES = ["logits_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"]  # some are slices of others' memory


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=_PLACES)
def _first_level_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, top_k_ptr, top_p_ptr, min_p_ptr,
    parts_ptr, bins_ptr, sums_ptr, ties_ptr, verdicts_ptr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum up what decides on a row's winner, and fill the histograms of level 0 with the tokens that rank above it."""
    r, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_segments = tl.num_programs(1)
    top_k, top_p, min_p = tl.load(top_k_ptr + r), tl.load(top_p_ptr + r), tl.load(min_p_ptr + r)
    if has_cut(top_k, top_p, vocab_size):
        row = logits_ptr + r * logits_row
        inverse = _inverse(tl.load(temperatures_ptr + r * temperature_step))
        parts = parts_ptr + r * COLUMNS * num_segments
        largest = folded_top(parts, num_segments, WIDTH)
        if largest == largest:
            token = folded_winner(parts + 4 * num_segments, num_segments, WIDTH)
            highest = rank_of(largest)
            floor = _floor(row, token, vocab_size, largest, inverse, min_p)
            shift = first_shift(highest - floor)
            bins = bins_ptr + r * LEVELS * 2 * BINS
            if s == 0:
                clear(bins + 2 * BINS)
                clear(bins + 4 * BINS)
            i = tl.arange(0, _LAST_BINS)
            tl.store(ties_ptr + (r * num_segments + s) * _LAST_BINS + i, tl.zeros((_LAST_BINS,), tl.int32))
            count = tl.zeros((BLOCK,), tl.int32)
            mass = tl.zeros((BLOCK,), tl.int64)
            before = tl.zeros((BLOCK,), tl.int32)
            whole = tl.zeros((BLOCK,), tl.int64)
            begin = s * SEGMENT
            for start in range(begin, tl.minimum(begin + SEGMENT, vocab_size), BLOCK):
                v = start + tl.arange(0, BLOCK)
                x = raw_tile(row, v, vocab_size)
                rank, each = rank_of(x), mass_of(x, largest, inverse)
                is_above = (rank > floor) & (v < vocab_size)
                count += is_above.to(tl.int32)
                mass += tl.where(is_above, each, 0)
                before += ((rank == floor) & (v < token)).to(tl.int32)
                whole += each
                add(bins, ((highest - rank) >> shift).to(tl.int32), each, is_above, BLOCK)
            sums = sums_ptr + r * _SUMS * num_segments + s
            tl.store(sums, tl.sum(count, 0).to(tl.int64))
            tl.store(sums + num_segments, tl.sum(mass, 0))
            tl.store(sums + 2 * num_segments, tl.sum(before, 0).to(tl.int64))
            tl.store(sums + 3 * num_segments, tl.sum(whole, 0))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=_PLACES)
def _next_level_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, top_k_ptr, top_p_ptr, min_p_ptr,
    parts_ptr, bins_ptr, sums_ptr, ties_ptr, verdicts_ptr,
    LEVEL: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Narrow the cut by one level's histograms, and fill those of the next one. All programs of a row decide alike.

    Level 1 also gives the verdict. One program of a row writes what later launches read.
    """
    r, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_segments = tl.num_programs(1)
    row = logits_ptr + r * logits_row
    inverse = _inverse(tl.load(temperatures_ptr + r * temperature_step))
    top_k = tl.load(top_k_ptr + r)
    parts, verdict = parts_ptr + r * COLUMNS * num_segments, verdicts_ptr + r * VERDICT
    if LEVEL == 1:
        state, floor, quota, limit = _verdict(
            row, vocab_size, inverse, top_k, tl.load(top_p_ptr + r), tl.load(min_p_ptr + r), parts,
            sums_ptr + r * _SUMS * num_segments, num_segments, WIDTH,
        )  # fmt: skip
        if s == 0:
            tl.store(verdict, state)
            tl.store(verdict + 1, floor)
            tl.store(verdict + 2, quota)
            tl.store(verdict + 3, limit)
    else:
        state = tl.load(verdict)
    if state == 2:
        largest = folded_top(parts, num_segments, WIDTH)
        highest = rank_of(largest)
        if LEVEL == 2:
            floor, limit = tl.load(verdict + 1), tl.load(verdict + 3)
        before = first_shift(highest - floor)  # bits that the level before leaves open
        prefix, count, mass = top_k * 0, top_k * 0, top_k * 0
        if LEVEL == 2:
            before = tl.maximum(before - BITS, 0)
            prefix, count, mass = tl.load(verdict + 4), tl.load(verdict + 5), tl.load(verdict + 6)
        bins = bins_ptr + r * LEVELS * 2 * BINS + (LEVEL - 1) * 2 * BINS
        found, count, mass = narrowed(bins, count, mass, top_k, limit)
        if LEVEL == 2:
            prefix = (prefix << (first_shift(highest - floor) - before)) | found
        else:
            prefix = found
        if s == 0:
            tl.store(verdict + 4 * LEVEL, prefix)
            tl.store(verdict + 4 * LEVEL + 1, count)
            tl.store(verdict + 4 * LEVEL + 2, mass)
        shift = tl.maximum(before - BITS, 0)
        begin = s * SEGMENT
        for start in range(begin, tl.minimum(begin + SEGMENT, vocab_size), BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = raw_tile(row, v, vocab_size)
            distance = highest - rank_of(x)
            is_in = ((distance >> before) == prefix) & (rank_of(x) > floor) & (v < vocab_size)
            if tl.max(is_in.to(tl.int32), 0) > 0:
                at = ((distance >> shift) & ((1 << (before - shift)) - 1)).to(tl.int32)
                add(bins + 2 * BINS, at, mass_of(x, largest, inverse), is_in, BLOCK)
                if LEVEL == 2:
                    ones = tl.full((BLOCK,), 1, tl.int32)
                    ties = ties_ptr + (r * num_segments + s) * _LAST_BINS
                    tl.atomic_add(ties + at, ones, mask=is_in, sem="relaxed")


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=[*_PLACES, "seeds_ptr", "positions_ptr"])
def _again_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, top_k_ptr, top_p_ptr, min_p_ptr,
    parts_ptr, bins_ptr, sums_ptr, ties_ptr, verdicts_ptr, seeds_ptr, positions_ptr, scores_ptr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the kept token of a segment with the largest score: those above the lowest kept rank, and some of it."""
    r, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_segments = tl.num_programs(1)
    verdict = verdicts_ptr + r * VERDICT
    state = tl.load(verdict)
    if state > 0:
        top_k = tl.load(top_k_ptr + r)
        parts = parts_ptr + r * COLUMNS * num_segments
        largest = folded_top(parts, num_segments, WIDTH)
        lowest, quota = tl.load(verdict + 1), tl.load(verdict + 2)
        earlier = tl.arange(0, WIDTH)
        if state == 1:
            # The winner is not kept, so that no token of its rank after it is either.
            last = folded_winner(parts + 4 * num_segments, num_segments, WIDTH)
            num = tl.where(quota > 0, s, 0)
            ties = tl.load(sums_ptr + (r * _SUMS + 2) * num_segments + earlier, mask=earlier < num, other=0)
        else:
            last = vocab_size
            highest, limit = rank_of(largest), tl.load(verdict + 3)
            width = tl.maximum(first_shift(highest - lowest) - BITS, 0)
            bins = bins_ptr + r * LEVELS * 2 * BINS + 4 * BINS
            found, count, mass = narrowed(bins, tl.load(verdict + 9), tl.load(verdict + 10), top_k, limit)
            lowest = highest - ((tl.load(verdict + 8) << width) | found)
            each = tl.load(bins + BINS + found) // tl.maximum(tl.load(bins + found), 1)
            quota = quota_of(top_k, count, mass, each, limit)
            at = ties_ptr + (r * num_segments + earlier) * _LAST_BINS + found
            ties = tl.load(at, mask=earlier < s, other=0).to(tl.int64)
        seen = tl.sum(ties, 0)
        temperature = tl.load(temperatures_ptr + r * temperature_step)
        a, b, c, d = row_key(tl.load(seeds_ptr + r), tl.load(positions_ptr + r))
        high, low, token = _best(
            logits_ptr + r * logits_row, s * SEGMENT, vocab_size, temperature, largest, lowest, quota, seen, last,
            tl.load(min_p_ptr + r), a, b, c, d, BLOCK, SEGMENT,
        )  # fmt: skip
        scores = scores_ptr + r * 3 * num_segments + s
        tl.store(scores, high)
        tl.store(scores + num_segments, low)
        tl.store(scores + 2 * num_segments, token.to(tl.float64))


@triton.jit
def _best(
    row, begin, vocab_size, temperature, largest, lowest, quota, seen, last, least, a, b, c, d,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Find the best score of a segment, and its token. seen: the tokens of the lowest rank in earlier segments."""
    inverse, scale = _inverse(temperature), temperature.to(tl.float64)
    top = largest.to(tl.float64) / scale
    best_high = top * 0.0 - float("inf")
    best_low = top * 0.0
    token = vocab_size * 0
    for start in range(begin, tl.minimum(begin + SEGMENT, vocab_size), BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = raw_tile(row, v, vocab_size)
        z = (x - largest) * inverse
        rank = rank_of(x)
        is_tie = (rank == lowest) & (v < last)
        if tl.max((rank >= lowest).to(tl.int32), 0) > 0:
            running = seen + tl.cumsum(is_tie.to(tl.int32), 0)
            is_kept = (rank > lowest) | (is_tie & (running <= quota))
            seen += tl.sum(is_tie.to(tl.int32), 0)
            is_able = is_kept & (filter_weights(z) >= least) & (x > -float("inf"))
            is_able &= may_win(v, z, bar_of(best_high, top), a, b)
            if tl.max(is_able.to(tl.int32), 0) > 0:
                best_high, best_low, token = better(
                    v, x, is_able, scale, vocab_size, a, b, c, d, best_high, best_low, token
                )
    return best_high, best_low, token


@triton.jit
def _verdict(
    row, vocab_size, inverse, top_k, top_p, min_p, parts, sums, num_segments, WIDTH: tl.constexpr
):  # fmt: skip
    """Decide whether a row's filters keep its winner: the first four numbers of its verdict."""
    state, quota, limit = top_k * 0, top_k * 0, top_k * 0 + (1 << 62)
    floor = top_k * 0 + _BELOW_ALL
    if has_cut(top_k, top_p, vocab_size) | ((min_p > 0.0) & (top_k != 1)):
        largest = folded_top(parts, num_segments, WIDTH)
        if largest == largest:
            token = folded_winner(parts + 4 * num_segments, num_segments, WIDTH)
            lowest = _floor(row, token, vocab_size, largest, inverse, min_p)
            is_light = lowest == _BELOW_ALL
            state = is_light.to(tl.int64)
            if has_cut(top_k, top_p, vocab_size):
                i = tl.arange(0, WIDTH)
                is_in = i < num_segments
                count = tl.sum(tl.load(sums + i, mask=is_in, other=0), 0)
                mass = tl.sum(tl.load(sums + num_segments + i, mask=is_in, other=0), 0)
                before = tl.sum(tl.load(sums + 2 * num_segments + i, mask=is_in, other=0), 0)
                whole = tl.sum(tl.load(sums + 3 * num_segments + i, mask=is_in, other=0), 0)
                limit = tl.where(top_p < 1.0, (whole.to(tl.float64) * top_p).to(tl.int64), limit)
                each = mass_of(raw_tile(row, token, vocab_size), largest, inverse)
                is_above = (count >= top_k) | (mass > limit)
                is_before = (count + before >= top_k) | (mass + before * each > limit)
                state = tl.where(is_above, 2, tl.where(is_before | is_light, 1, 0)).to(tl.int64)
                floor = lowest
                quota = tl.where(before > 0, quota_of(top_k, count, mass, each, limit), 0)
    return state, floor, quota, limit


@triton.jit
def _floor(row, token, vocab_size, largest, inverse, min_p):
    """Return the rank of the winner: above it is a cut that removes it. If min_p does, the cut may be anywhere."""
    x = raw_tile(row, token, vocab_size)
    return tl.where(filter_weights((x - largest) * inverse) < min_p, _BELOW_ALL, rank_of(x))


@triton.jit
def _inverse(temperature):
    return tl.div_rn(temperature * 0.0 + 1.0, temperature)
