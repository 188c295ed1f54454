"""One pass over rows of logits on a GPU (Triton): for their log-probabilities, and for the token of the largest score.

One program reads one row, in tiles of fixed size from the first token to the last: each lane keeps its own running
maximum and sum, and the lanes are combined once, at the end. So a row's bits depend on that row alone. One binary
serves draws and the trainer, which wants the statistics only: both get the same bits.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import INTERPRETED, widened
from .triton_noise import gumbel_noise, noise_word, row_key

BLOCK_V = 2048
NUM_WARPS = 16
# Not specialised by the compiler, and neither are alignments: logits that start elsewhere in memory would get another
# layout of lanes, and so another order of addition.
SIZES = ["vocab_size", "logits_row", "temperature_step"]
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}  # else the compiler makes one rounding of a product and a sum
MARGIN = tl.constexpr(1.0001)  # covers the errors of bounds in float32
_FIRST_BAR = tl.constexpr(0.0247)  # exp(-3.7): the noise of the largest logit is above -3.7


@dataclass(frozen=True)
class Scanned:
    """The results of one pass over R rows."""

    statistics: Tensor  # float32 [R, 2]: the maximum m of logits / temperature, and log(sum(exp(x - m))) of these x
    winners: Tensor  # int64 [R]: the token with the largest score, before all filters; 0 in a row without one
    largest: Tensor  # float32 [R]: the largest logit; NaN in a row with NaN or inf, or with -inf alone


def statistics(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute the statistics float32 [R, 2] of logits [R, V] at temperatures float32 [R] or [1]."""
    return _scan(logits, temperatures, None).statistics


def scan(logits: Tensor, temperatures: Tensor, noise_keys: tuple[Tensor, Tensor]) -> Scanned:
    """Compute the statistics of logits [R, V], and draw without filters. noise_keys: seeds and positions, int64 [R]."""
    return _scan(logits, temperatures, noise_keys)


def _scan(logits: Tensor, temperatures: Tensor, noise_keys: tuple[Tensor, Tensor] | None) -> Scanned:
    found = Scanned(
        torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device),
        torch.empty(len(logits), dtype=torch.int64, device=logits.device),
        torch.empty(len(logits), dtype=torch.float32, device=logits.device),
    )
    seeds, positions = noise_keys or (found.winners, found.winners)
    if len(logits):
        with torch.cuda.device_of(logits):
            _scan_kernel[(len(logits),)](
                *(logits, temperatures.contiguous(), logits.shape[1], logits.stride(0), step_of(temperatures)),
                *(int(noise_keys is not None), seeds.contiguous(), positions.contiguous()),
                *(found.statistics, found.winners, found.largest),
                BLOCK=BLOCK_V, num_warps=NUM_WARPS, **UNFUSED,
            )  # fmt: skip
    return found


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
def may_win(v, z, bar, a, b):
    """Return which tokens may have the best score. z: scaled logits less a reference; bar: exp(best - reference).

    A token whose noise is bounded by -log(u) loses if u * bar is above its own exp(z).
    """
    bound = (noise_word(v, a, b) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    return bound * bar <= tl.exp(z) * MARGIN


@triton.jit
def bar_of(best_high, reference):
    """Compute exp(best - reference) of a score and a scaled logit, at least what the noise of that logit reaches."""
    return tl.maximum(tl.exp((best_high - reference).to(tl.float32)), _FIRST_BAR)


@triton.jit(
    do_not_specialize=[*SIZES, "draws"],
    do_not_specialize_on_alignment=["logits_ptr", "seeds_ptr", "positions_ptr"],
)
def _scan_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, draws, seeds_ptr, positions_ptr,
    stats_ptr, winners_ptr, largest_ptr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    row = logits_ptr + r * logits_row
    temperature = tl.load(temperatures_ptr + r * temperature_step)
    inverse = tl.div_rn(temperature * 0.0 + 1.0, temperature)
    scale = temperature.to(tl.float64)
    a, b, c, d = row_key(
        tl.load(seeds_ptr + r, mask=draws > 0, other=0), tl.load(positions_ptr + r, mask=draws > 0, other=0)
    )
    lanes = tl.full((BLOCK,), -float("inf"), tl.float32)  # the largest scaled logit of each lane
    total = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    top = temperature * 0.0 - float("inf")  # the largest logit
    best_high = scale * 0.0 - float("inf")
    best_low = scale * 0.0
    token = vocab_size * 0
    for start in range(0, vocab_size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        raw = raw_tile(row, v, vocab_size)
        x = tl.div_rn(raw, temperature)
        previous = lanes
        lanes = tl.maximum(previous, x)
        base = tl.where(lanes == -float("inf"), 0.0, lanes)  # a lane that has seen only -inf stays at 0
        total = total * tl.exp(previous - base) + tl.exp(x - base)
        if draws > 0:
            broken |= ((raw != raw) | (raw == float("inf"))).to(tl.int32)
            top = tl.maximum(top, tl.max(raw, 0))
            bar = bar_of(best_high, top.to(tl.float64) / scale)
            is_able = may_win(v, (raw - top) * inverse, bar, a, b) & (raw > -float("inf"))
            if tl.max(is_able.to(tl.int32), 0) > 0:
                best_high, best_low, token = better(
                    v, raw, is_able, scale, vocab_size, a, b, c, d, best_high, best_low, token
                )
    maximum = tl.max(lanes, 0)
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    tl.store(stats_ptr + 2 * r, maximum)
    tl.store(stats_ptr + 2 * r + 1, tl.log(tl.sum(total * tl.exp(lanes - base), 0)))
    is_broken = (tl.max(broken, 0) > 0) | (top == -float("inf"))
    tl.store(largest_ptr + r, tl.where(is_broken, float("nan"), top), mask=draws > 0)
    tl.store(winners_ptr + r, tl.where(is_broken, 0, token).to(tl.int64), mask=draws > 0)
