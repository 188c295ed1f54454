"""Draws of tokens from rows of logits, and the counter-based noise that decides them.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..machine.gpu import triton_serves
from . import cpp as native_sampling
from .logprobs import scaled_logprobs

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the golden-ratio increment of SplitMix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

KEEP_ALL = 2**62  # a top_k above the size of any vocabulary


@dataclass(frozen=True)
class RowSettings:
    """Settings of the draws of R rows; tensors on the device of the logits."""

    temperatures: Tensor  # float32, positive
    seeds: Tensor  # int64, of the noise
    top_k: Tensor  # int64, at least 1; 1 takes the most likely token (the first of equal ones) for any noise
    top_p: Tensor  # float64, in (0, 1]
    min_p: Tensor  # float32, in [0, 1]
    filtered: Tensor  # int64: the rows where top_k, top_p or min_p excludes tokens


@dataclass(frozen=True)
class Drawn:
    """R drawn tokens."""

    token_ids: Tensor  # int64
    logprobs: Tensor  # float32: `scaled_logprobs` of the model's logits, bit for bit; NaN where the logits are broken
    chances: Tensor  # float32: probability in the distribution drawn from, before the filters


def draw_tokens(
    logits: Tensor,
    settings: RowSettings,
    positions: Tensor,
    reshaped: tuple[Tensor, Tensor] | None = None,
    allowed: tuple[Tensor, Tensor] | None = None,
) -> Drawn:
    """Draw one token per row of logits [R, V] by inverse transform of `uniform_noise(seeds, positions)`.

    positions: int64. A filter keeps a prefix of the tokens ranked by logit / temperature, equal ones by id: top_k keeps
    the first k; top_p the tokens with no more than top_p of the probability before them; min_p the tokens with at least
    min_p times the first one's probability. Each uses the unfiltered probabilities, and only tokens that all filters
    keep are drawn.

    reshaped: rows int64 [C] and float32 [C, V], the logits to draw from in these rows. allowed: rows int64 [M] and
    uint8 [M, B], the tokens that may be drawn in these rows, one bit each, the lowest first; tokens after the last bit
    are not allowed. A row's token depends on its own logits, settings and position alone. A row with NaN or +inf gets
    some token.
    """
    if native_sampling.serves(logits):
        keys, filters = (settings.seeds, positions), (settings.top_k, settings.top_p, settings.min_p)
        return Drawn(*native_sampling.draw(logits, settings.temperatures, keys, filters, reshaped, allowed))
    if triton_serves(logits.device):
        from . import triton_draws as triton_sampling  # imports Triton, which may not be installed

        keys, filters = (settings.seeds, positions), (settings.top_k, settings.top_p, settings.min_p)
        return Drawn(*triton_sampling.draw(logits, settings.temperatures, keys, filters, reshaped, allowed))
    return _draw(logits, settings, positions, reshaped, allowed)


def _draw(
    logits: Tensor,
    settings: RowSettings,
    positions: Tensor,
    reshaped: tuple[Tensor, Tensor] | None,
    allowed: tuple[Tensor, Tensor] | None,
) -> Drawn:
    logprobs = scaled_logprobs(logits, settings.temperatures)
    wanted = logprobs  # the log of the distribution to draw from
    if reshaped is not None or allowed is not None:
        wanted = logprobs.clone()
    if reshaped is not None:
        rows, values = reshaped
        wanted[rows] = scaled_logprobs(values, settings.temperatures[rows])
    if allowed is not None:
        rows, masks = allowed
        banned = ~_unpacked(masks, logits.shape[1])
        wanted[rows] = torch.log_softmax(wanted[rows].masked_fill(banned, -torch.inf), -1)
    probabilities = wanted.exp()
    kept = probabilities
    if len(rows := settings.filtered):
        limits = (settings.top_k[rows], settings.top_p[rows], settings.min_p[rows])
        kept = probabilities.index_copy(0, rows, _filtered(probabilities[rows], *limits))
    drawn = sample_from(kept, uniform_noise(settings.seeds, positions))
    token_ids = torch.where(settings.top_k == 1, wanted.argmax(-1), drawn)
    column = token_ids.unsqueeze(-1)
    return Drawn(token_ids, logprobs.gather(-1, column).squeeze(-1), probabilities.gather(-1, column).squeeze(-1))


def _filtered(probabilities: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the probabilities [R, V] with zeros for the tokens that are not kept; limits [R]."""
    k, p, m = (limit.unsqueeze(-1) for limit in (top_k, top_p, min_p))
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.double().cumsum(-1) - ranked
    keep = torch.arange(probabilities.shape[-1], device=probabilities.device) < k
    keep &= (mass_before <= p) | (p >= 1.0)
    keep &= ranked >= ranked[:, :1] * m
    return torch.zeros_like(ranked).scatter_(-1, order, ranked * keep)


def _unpacked(masks: Tensor, vocab_size: int) -> Tensor:
    """Unpack uint8 [M, B] of bits, the lowest first -> bool [M, V]; False after the last bit."""
    bits = (masks.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    bits = bits.flatten(1)[:, :vocab_size].bool()
    return torch.nn.functional.pad(bits, (0, vocab_size - bits.shape[1]))


def derive_seed(*parts: int) -> int:
    """Derive one int64 seed from several numbers: equal parts give equal seeds, any other parts an unrelated one."""
    state = 0
    for part in parts:
        z = (state + part + _GAMMA) % 2**64
        z = (z ^ (z >> 30)) * _MIX_1 % 2**64
        z = (z ^ (z >> 27)) * _MIX_2 % 2**64
        state = z ^ (z >> 31)
    return (state + 2**63) % 2**64 - 2**63


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute noise float64 [R] in [0, 1): a pure function of (seed, position), both int64 [R].

    The stream of a seed is SplitMix64 (Steele, Lea, Flood 2014) started at the mixed seed and read at `position`.
    """
    bits = _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)
    # 52 bits, one less than a double holds, so that noise * total stays below total after rounding.
    return _shift_right(bits, 12).double() * 2.0**-52


def sample_from(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Choose the token int64 [R] at which a row's running sum passes noise * total (inverse transform sampling).

    probabilities [R, V], not negative, each row with a positive sum, not necessarily 1; noise float64 [R] in [0, 1).
    Zero-probability tokens are never chosen. A row that holds NaN gets some token; its log-probability is NaN too, and
    the code that reports it refuses it.
    """
    running = probabilities.double().cumsum(-1)
    threshold = noise.unsqueeze(-1) * running[:, -1:]
    return torch.searchsorted(running, threshold, right=True).squeeze(-1).clamp_(max=probabilities.shape[-1] - 1)


def _mix(z: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64, whose products wrap around as unsigned ones do."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
