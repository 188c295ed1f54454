"""The definition of a draw, in PyTorch: the token with the largest score logit / temperature + noise among those kept.

Every step is an operation on integers or a single IEEE operation, so that PyTorch, C++ and Triton choose the same
token from equal logits x (float32; other types are widened) at equal temperature t (float32):

- Score: the exact sum of float64(x) / float64(t) and the token's noise (noise.py), as two float64 of which the first
  is the rounded sum. The largest score wins, equal ones by the lowest id. No token's score depends on another token,
  so a filter or a mask that removes other tokens keeps the choice.
- Weight, for the filters: exp(z) of z = (x - largest x) * (1 / t), by a polynomial in float32.
- Mass: the weight in units of 2^-40, rounded down to an integer. Sums of masses do not depend on an order.
- Ranking: by x, equal ones by id. top_k keeps the first k tokens; top_p those with no more mass before them than
  trunc(float64(sum of all masses) * top_p), unless top_p is 1; min_p those with a weight of at least min_p.

A row with NaN or +inf, or with -inf alone, has no such token and gets token 0.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import gumbel_noise, noise_word, row_keys

MASS_UNITS = 2.0**40  # in a weight of 1: masses of 2^22 tokens fit into an int64
_MAX_SCORES = 1 << 20  # computed at a time
_MARGIN = 1.0001  # covers the errors of bounds in float32


def choose(
    logits: Tensor, temperatures: Tensor, noise_keys: tuple[Tensor, Tensor], filters: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Choose the token int64 [R] of each row of logits [R, V], float32.

    temperatures: float32 [R]; noise_keys: seeds and positions, int64 [R]; filters: top_k int64, top_p float64, min_p
    float32 [R].
    """
    seeds, positions = noise_keys
    chosen = torch.zeros_like(seeds)
    temperatures = temperatures.expand(len(logits))
    count = max(1, _MAX_SCORES // max(logits.shape[1], 1))
    for start in range(0, len(logits), count):
        rows = slice(start, start + count)
        x, top_k = logits[rows], filters[0][rows]
        kept = kept_tokens(x, temperatures[rows], top_k, filters[1][rows], filters[2][rows])
        winner = _winner(x, kept, temperatures[rows], row_keys(seeds[rows], positions[rows]))
        largest = x.amax(-1)
        is_broken = largest.isnan() | largest.isinf()
        chosen[rows] = torch.where(top_k == 1, x.argmax(-1), winner).masked_fill_(is_broken, 0)
    return chosen


def _winner(logits: Tensor, kept: Tensor | None, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Find the kept token with the largest score, the first of equal ones; 0 in a broken row. keys: [4, R].

    Only tokens that may win get a logarithm. The noise of a token with the number v is at most -log(v), so it loses if
    v * exp(best - largest scaled logit) is above its exp(z), where best is any token's score.
    """
    a, b, _, _ = keys.unsqueeze(-1)
    every = torch.arange(logits.shape[1], device=logits.device)
    v = noise_word(every, a, b).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
    largest = logits.amax(-1, keepdim=True)
    e = (logits - largest).div_(temperatures.unsqueeze(-1)).exp_()
    if kept is not None:
        e.masked_fill_(~kept, 0.0)
    first = (v / e).nan_to_num_(torch.inf, torch.inf).argmin(-1, keepdim=True)
    y, g = _scaled(logits.gather(-1, first), temperatures.unsqueeze(-1)), gumbel_noise(keys.unsqueeze(-1), first)
    reached = ((y - _scaled(largest, temperatures.unsqueeze(-1))) + g).exp().float()
    rows, ids = (v.mul_(reached) <= e.mul_(_MARGIN)).nonzero(as_tuple=True)
    is_able = e[rows, ids] > 0
    rows, ids = rows[is_able], ids[is_able]
    y, g = _scaled(logits[rows, ids], temperatures[rows]), gumbel_noise(keys[:, rows], ids)
    high = y + g
    back = high - y
    low = (y - (high - back)) + (g - back)  # the rounding error of the sum: Knuth's TwoSum
    for part in (0, 1):  # the best sums, and of equal ones the best errors
        value = (high, low)[part]
        best = value.new_full((len(logits),), -torch.inf).scatter_reduce_(0, rows, value, "amax")
        is_best = value == best[rows]
        low, rows, ids = low[is_best], rows[is_best], ids[is_best]
    return torch.zeros_like(first[:, 0]).scatter_reduce_(0, rows, ids, "amin", include_self=False)


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    return logits.double() / temperatures.double()


def kept_tokens(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor | None:
    """Find the tokens that the filters keep: bool [R, V], or None if no row's filters exclude any."""
    k, p, m = (limit.unsqueeze(-1) for limit in (top_k, top_p, min_p))
    rows = ((k < logits.shape[1]) | (p < 1.0) | (m > 0.0)).squeeze(-1).nonzero().squeeze(-1)
    if not len(rows):
        return None
    kept = torch.ones_like(logits, dtype=torch.bool)
    x, k, p, m = (each[rows] for each in (logits, k, p, m))
    inverse = torch.ones_like(temperatures[rows]) / temperatures[rows]
    weight = weights((x - x.amax(-1, keepdim=True)) * inverse.unsqueeze(-1))
    mass = (weight * MASS_UNITS).to(torch.int64)
    order = x.sort(dim=-1, descending=True, stable=True).indices
    ranked = mass.gather(-1, order)
    limit = (mass.sum(-1, keepdim=True).double() * p).to(torch.int64)
    within = torch.arange(x.shape[-1], device=x.device) < k
    within &= (ranked.cumsum(-1) - ranked <= limit) | (p >= 1.0)
    return kept.index_copy(0, rows, torch.zeros_like(within).scatter(-1, order, within) & (weight >= m))


def weights(z: Tensor) -> Tensor:
    """Compute exp(z) of float32 z <= 0 within 1e-6, in operations of one rounding each; 0 below -87.3.

    Range reduction and polynomial are those of Cephes expf (S. Moshier).
    """
    y = z.clamp(min=-87.3)
    t = y * 1.44269504088896341 + 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    n = t - 12582912.0
    r = n * -0.693359375 + y
    r = n * 2.12194440e-4 + r
    p = torch.full_like(r, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    power = ((t.view(torch.int32) << 23) + (127 << 23)).view(torch.float32)
    return (p * power).masked_fill(z < -87.3, 0.0)
