"""Log-probabilities of chosen tokens, and the counter-based noise that chooses them. Letters: R rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the golden-ratio increment of SplitMix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def scaled_logprobs(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """log_softmax(logits / temperature) over the full vocabulary, in float32.

    logits [R, V]; temperature a number, or float32 [R], positive. Each row depends on itself alone. Differentiable: the
    trainer calls this very function on its logits, which makes its log-probabilities the engine's.
    """
    if not isinstance(temperature, Tensor):  # a tensor, since dividing by a number multiplies by its inverse on a GPU
        temperature = torch.full((1,), temperature, device=logits.device)
    return torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)


def selected_logprobs(logits: Tensor, token_ids: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Log-probability [R] of one token per row: logits [R, V], token_ids int64 [R]. Differentiable."""
    return scaled_logprobs(logits, temperature).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def derive_seed(*parts: int) -> int:
    """One int64 seed from several numbers: equal parts give equal seeds, any other parts an unrelated one."""
    state = 0
    for part in parts:
        z = (state + part + _GAMMA) % 2**64
        z = (z ^ (z >> 30)) * _MIX_1 % 2**64
        z = (z ^ (z >> 27)) * _MIX_2 % 2**64
        state = z ^ (z >> 31)
    return (state + 2**63) % 2**64 - 2**63


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 [R] in [0, 1): a pure function of (seed, position), both int64 [R].

    The stream of a seed is SplitMix64 (Steele, Lea, Flood 2014) started at the mixed seed and read at `position`.
    """
    bits = _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)
    # 52 bits, one less than a double holds, so that noise * total stays below total after rounding.
    return _shift_right(bits, 12).double() * 2.0**-52


def sample_from(probabilities: Tensor, noise: Tensor) -> Tensor:
    """int64 [R]: the token at which the running sum of the row passes noise * total (inverse transform sampling).

    probabilities [R, V], not negative, each row with a positive sum, not necessarily 1; noise float64 [R] in [0, 1).
    Zero-probability tokens are never chosen. A row that holds NaN gets some token: whoever reports its log-probability,
    NaN too, refuses it.
    """
    running = probabilities.double().cumsum(-1)
    threshold = noise.unsqueeze(-1) * running[:, -1:]
    return torch.searchsorted(running, threshold, right=True).squeeze(-1).clamp_(max=probabilities.shape[-1] - 1)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap around as the unsigned ones do."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
