"""Draws of tokens from rows of logits by the Gumbel maximum, and the choice of their path.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..machine.gpu import triton_serves
from . import cpp as native_sampling
from .logprobs import scaled_logprobs
from .noise import GAMMA, MIX_1, MIX_2
from .reference import choose
from .wanted import wanted_logits

KEEP_ALL = 2**62  # a top_k above the size of any vocabulary


@dataclass(frozen=True)
class RowSettings:
    """Settings of the draws of R rows; tensors on the device of the logits."""

    temperatures: Tensor  # float32, positive; beyond 1e37 chances are NaN where denormal numbers are flushed
    seeds: Tensor  # int64, of the noise
    top_k: Tensor  # int64, at least 1; 1 takes the most likely token (the first of equal ones) for any noise
    top_p: Tensor  # float64, in (0, 1]
    min_p: Tensor  # float32, in [0, 1]


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
    """Draw one token per row of logits [R, V]: the one with the largest logit / temperature + noise.

    The noise is a Gumbel number of (seed, position, token id), so tokens are drawn with the probabilities of
    softmax(logits / temperature). reference.py has the definition, which all paths follow bit for bit.

    positions: int64. A filter keeps a prefix of the tokens ranked by logit, equal ones by id: top_k keeps the first k;
    top_p the tokens with no more than top_p of the probability before them; min_p the tokens with at least min_p times
    the first one's probability. Each uses the unfiltered probabilities, and only tokens that all filters keep are
    drawn. A filter or mask that removes other tokens keeps the choice.

    reshaped: rows int64 [C] and float32 [C, V], the logits to draw from in these rows. allowed: rows int64 [M] and
    uint8 [M, B], the tokens that may be drawn in these rows, one bit each, the lowest first; tokens after the last bit
    are not allowed. A row's token depends on its own logits, settings and position alone. A row with NaN or +inf gets
    token 0.
    """
    keys, filters = (settings.seeds, positions), (settings.top_k, settings.top_p, settings.min_p)
    if native_sampling.serves(logits):
        return Drawn(*native_sampling.draw(logits, settings.temperatures, keys, filters, reshaped, allowed))
    if triton_serves(logits.device):
        from . import triton_draws as triton_sampling  # imports Triton, which may not be installed

        return Drawn(*triton_sampling.draw(logits, settings.temperatures, keys, filters, reshaped, allowed))
    return reference_draw(logits, settings, positions, reshaped, allowed)


def reference_draw(
    logits: Tensor,
    settings: RowSettings,
    positions: Tensor,
    reshaped: tuple[Tensor, Tensor] | None = None,
    allowed: tuple[Tensor, Tensor] | None = None,
) -> Drawn:
    """Draw tokens as `draw_tokens` does, in PyTorch on any device."""
    logprobs = scaled_logprobs(logits, settings.temperatures)
    wanted = wanted_logits(logits, reshaped, allowed)
    filters = (settings.top_k, settings.top_p, settings.min_p)
    token_ids = choose(wanted, settings.temperatures, (settings.seeds, positions), filters)
    column = token_ids.unsqueeze(-1)
    own = logprobs
    if reshaped is not None or allowed is not None:
        own = torch.log_softmax(wanted / settings.temperatures.unsqueeze(-1), -1)
    return Drawn(token_ids, logprobs.gather(-1, column).squeeze(-1), own.gather(-1, column).squeeze(-1).exp())


def derive_seed(*parts: int) -> int:
    """Derive one int64 seed from several numbers: equal parts give equal seeds, any other parts an unrelated one."""
    state = 0
    for part in parts:
        z = (state + part + GAMMA) % 2**64
        z = (z ^ (z >> 30)) * MIX_1 % 2**64
        z = (z ^ (z >> 27)) * MIX_2 % 2**64
        state = z ^ (z >> 31)
    return (state + 2**63) % 2**64 - 2**63
