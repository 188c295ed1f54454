"""The policy losses by name, as pure functions of packed tokens: what is maximised per token, and what is averaged.

Dimension letters: M sampled tokens of S sequences, one sequence after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Divisor = Literal["tokens", "samples", "places"]


class Terms(NamedTuple):
    """The objective of each token, and whether the clip has taken its gradient."""

    objective: Tensor  # float [M], to be maximised
    is_clipped: Tensor  # bool [M]; of "cispo", which takes none, whether its weight is at the bound


@dataclass(frozen=True)
class Surrogate:
    """One loss: the objective per token, and what the sum is divided by."""

    terms: Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[int], float, float], Terms]
    divisor: Divisor  # tokens that count; samples, each the mean of its tokens; or samples times max_new_tokens


def clipped_terms(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    clip_low: float,
    clip_high: float,
) -> Terms:
    """Compute min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) of each token.

    logprobs, log_ratio (both with gradient; the ratio 0 where the mask is false), advantages: [M]; mask: bool [M];
    lengths: number of tokens of each sequence.

    Source: Schulman et al., "Proximal Policy Optimization", 2017, eq. 7 (arXiv 1707.06347).
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return Terms(torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages)


def sequence_terms(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    clip_low: float,
    clip_high: float,
) -> Terms:
    """Compute the clipped terms with one ratio for each sequence: the geometric mean of its tokens' ratios.

    Source: Zheng et al., "Group Sequence Policy Optimization", 2025, eq. 5 to 7 (arXiv 2507.18071). Arguments as for
    `clipped_terms`.
    """
    counts = torch.tensor(lengths, device=log_ratio.device)
    means = [part.sum() / max(int(its.sum()), 1) for part, its in
             zip(log_ratio.split(list(lengths)), mask.split(list(lengths)), strict=True)]  # fmt: skip
    log_ratios = torch.stack(means).repeat_interleave(counts)
    return clipped_terms(logprobs, log_ratios, advantages, mask, lengths, clip_low, clip_high)


def weighted_terms(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    clip_low: float,
    clip_high: float,
) -> Terms:
    """Compute min(ratio, 1 + clip_high) * A * log p of each token, with no gradient through the ratio: every token
    keeps one of its own.

    Source: MiniMax, "MiniMax-M1", 2025, eq. 4 and 5 (CISPO, arXiv 2506.13585). Arguments as for `clipped_terms`.
    """
    ratio = log_ratio.detach().exp()
    weights = ratio.clamp(max=1.0 + clip_high)
    return Terms(weights * advantages * torch.where(mask, logprobs, 0.0), ratio > weights)


# token_mean: the clipped surrogate, averaged over the step's tokens. grpo: Shao et al., "DeepSeekMath", 2024, eq. 3
# (arXiv 2402.03300). dr_grpo: Liu et al., "Understanding R1-Zero-Like Training", 2025, section 3.2 (arXiv 2503.20783):
# divided by a constant. dapo: Yu et al., "DAPO", 2025, eq. 8 and section 4.1 (arXiv 2503.14476): a higher upper bound.
# The bounds are settings (`CLIP_BOUNDS`).
SURROGATES = {
    "token_mean": Surrogate(clipped_terms, "tokens"),
    "grpo": Surrogate(clipped_terms, "samples"),
    "dr_grpo": Surrogate(clipped_terms, "places"),
    "dapo": Surrogate(clipped_terms, "tokens"),
    "gspo": Surrogate(sequence_terms, "samples"),
    "cispo": Surrogate(weighted_terms, "tokens"),
}


def token_weights(divisor: Divisor, mask: Tensor, lengths: Sequence[int], sizes: Sequence[int] = ()) -> Tensor | None:
    """Return the weight of each token in the sum, float32 [M]: 1 / tokens of its answer that count, if samples are
    averaged; None: all weigh 1. sizes: that number for each sequence, where some are parts of an answer; empty: each is
    an answer."""
    if divisor != "samples":
        return None
    counts = [max(size, 1) for size in sizes] or [max(int(part.sum()), 1) for part in mask.split(list(lengths))]
    repeats = torch.tensor(lengths, device=mask.device)
    return (1.0 / torch.tensor(counts, dtype=torch.float32, device=mask.device)).repeat_interleave(repeats)


def amount(divisor: Divisor, mask: Tensor, num_answers: int, max_new_tokens: int) -> int:
    """Return what a batch adds to the divisor of the sum. num_answers: of its sequences; those without a token that
    counts are none."""
    if divisor == "tokens":
        return int(mask.sum())
    return num_answers if divisor == "samples" else num_answers * max_new_tokens
