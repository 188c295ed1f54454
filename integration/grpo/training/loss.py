"""The arithmetic of a policy loss as pure functions of tensors: the loss, weights of older tokens, KL estimate.

Sampled tokens have any layout, with a mask.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .surrogates import SURROGATES, token_weights


@dataclass(frozen=True)
class PolicyLoss:
    """The loss to differentiate and, detached, numbers to log, of tokens whatever the loss averages. The shares are
    summed over ranks and micro-batches."""

    loss: Tensor  # scalar; this rank's share of the token mean over the whole batch, KL included
    clip_fraction: float  # this rank's share of the fraction of tokens whose gradient is zero by the clip
    kl: float  # this rank's share of the mean KL to the reference per token; 0.0 without a reference


def policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reference_logprobs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    *,
    name: str = "token_mean",
    lengths: Sequence[int] = (),
    sizes: Sequence[int] = (),
    num_counted: int | None = None,
    kl_weights: Tensor | None = None,
    bonus: Tensor | None = None,
) -> PolicyLoss:
    """Compute a policy loss, by default the clipped one per token, and the KL to a reference, with the same weights.

    logprobs (with gradient), behaviour_logprobs, advantages, reference_logprobs: one shape, one value per
    sampled token; mask: bool, same shape, true for the tokens that count; values where it is false are ignored.
    num_tokens: what the sum is divided by: the number of tokens that count, over all ranks and micro-batches, so that
    every token has the same weight for any division into micro-batches; of other losses, see `surrogates.amount`. DDP
    averages gradients over ranks: back-propagate `loss` times the number of ranks. name: one of `SURROGATES`; lengths:
    number of tokens of each sequence, of all losses but "token_mean", "dapo", "dr_grpo" and "cispo", for one row [M];
    sizes: see `token_weights`. num_counted: what the numbers to log are divided by, the number of tokens that count
    over all ranks and micro-batches; None: num_tokens. kl_weights: same shape, without gradient, at least 0: of each
    token's estimate, where another policy has drawn it (`importance_weights`); None: all 1. bonus: same shape, with
    gradient: added to each token's objective, such as its entropy times a coefficient; None: nothing.

    Raises ValueError for shapes that differ, a non-positive num_tokens, or a KL coefficient without a
    reference.

    Sources: `surrogates`; KL per token, Schulman, "Approximating KL Divergence", 2020, estimator k3, as in
    DeepSeekMath, eq. 4.
    """
    _check_policy_loss(logprobs, behaviour_logprobs, advantages, mask, num_tokens, reference_logprobs, kl_coefficient)
    surrogate = SURROGATES[name]
    log_ratio = torch.where(mask, logprobs - behaviour_logprobs.detach(), 0.0)
    # Masked before the product, because 0 * inf is NaN, and its gradient too.
    advantages = torch.where(mask, advantages.detach(), 0.0)
    terms = surrogate.terms(logprobs, log_ratio, advantages, mask, lengths, clip_low, clip_high)
    weights = token_weights(surrogate.divisor, mask, lengths, sizes)

    def weighted_sum(values: Tensor) -> Tensor:
        return values.sum() if weights is None else (values * weights).sum()

    objective = terms.objective if bonus is None else terms.objective + torch.where(mask, bonus, 0.0)
    loss = -weighted_sum(objective) / num_tokens
    mean_kl, counted = 0.0, num_tokens if num_counted is None else num_counted
    if reference_logprobs is not None:
        kl = _weighted_kl(logprobs, reference_logprobs, mask, kl_weights)
        mean_kl = kl.detach().sum().item() / counted
        # A product with a coefficient of 0 would turn an infinite estimate into NaN.
        if kl_coefficient:
            loss = loss + kl_coefficient * (weighted_sum(kl) / num_tokens)
    clip_fraction = (terms.is_clipped & mask).sum().item() / counted
    return PolicyLoss(loss=loss, clip_fraction=clip_fraction, kl=mean_kl)


def _weighted_kl(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    """Return the estimate of each token, 0 where it does not count, times its weight."""
    # Masked before the product, because 0 * inf is NaN, and its gradient too.
    kept = mask if weights is None else mask & (weights > 0)
    kl = kl_k3(torch.where(kept, reference_logprobs.detach() - logprobs, 0.0))
    return kl if weights is None else kl * weights


def importance_weights(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    is_older: Tensor,
    lengths: Sequence[int],
    bound: float,
    sequence_bound: float = 0.0,
) -> Tensor:
    """Compute the weights with which tokens of older weights count: min(p / p_behaviour, bound); 1.0 for the others.

    logprobs: of the trainer's weights before its first step on the batch; behaviour_logprobs: those with which the
    tokens were drawn; is_older: bool; all [M], the tokens of one sequence after those of another, `lengths` of each.
    sequence_bound: above 1, the tokens of a sequence count nothing if the product of its ratios is above it or below
    its inverse; 0: all count. Returns float32 [M], without gradient.

    Sources: truncated importance sampling, Ionides, "Truncated Importance Sampling", 2008 (JCGS 17:2); the weight as a
    factor of a surrogate around the trainer's own weights ("decoupled"), Hilton et al., "Batch size-invariance for
    policy optimization", 2021, section 3 (arXiv 2110.00641), and Fu et al., "AReaL", 2025, section 5 (arXiv
    2505.24298).
    """
    log_ratio = torch.where(is_older, logprobs.detach() - behaviour_logprobs, 0.0)
    weights = log_ratio.exp().clamp(max=bound)
    if sequence_bound:
        weights = torch.where(_is_beyond(log_ratio, lengths, sequence_bound), 0.0, weights)
    return weights


def _is_beyond(log_ratio: Tensor, lengths: Sequence[int], bound: float) -> Tensor:
    """Return whether the product of the ratios of each token's sequence is beyond a bound, bool [M]."""
    sums = torch.stack([part.sum() for part in log_ratio.split(list(lengths))])
    return (sums.abs() > math.log(bound)).repeat_interleave(torch.tensor(lengths, device=log_ratio.device))


class RatioNumbers(NamedTuple):
    """The ratios p / p_behaviour of tokens that older weights have drawn, in numbers that add up, but for the most."""

    num: float = 0.0  # tokens
    total: float = 0.0  # of their ratios, before they are bounded
    num_bounded: float = 0.0  # tokens whose weight is at `importance_bound`
    num_dropped: float = 0.0  # tokens of sequences beyond `sequence_bound`
    most: float = 0.0  # the largest ratio


def ratio_numbers(
    logprobs: Tensor, behaviour_logprobs: Tensor, is_older: Tensor, lengths: Sequence[int], bound: float,
    sequence_bound: float = 0.0,
) -> RatioNumbers:  # fmt: skip
    """Return the numbers of a batch with at least one token of older weights. Arguments as for `importance_weights`."""
    log_ratio = torch.where(is_older, logprobs.detach() - behaviour_logprobs, 0.0)
    ratio = log_ratio.double().exp()[is_older]
    dropped = _is_beyond(log_ratio, lengths, sequence_bound)[is_older] if sequence_bound else is_older.new_zeros(1)
    if not ratio.numel():
        return RatioNumbers()
    found = (ratio.sum(), (ratio > bound).sum(), dropped.sum(), ratio.max())
    return RatioNumbers(float(ratio.numel()), *torch.stack([one.double() for one in found]).tolist())


def kl_k3(reference_log_ratio: Tensor) -> Tensor:
    """Estimate KL(policy || reference) for tokens drawn from the policy, by Schulman's k3. It is never negative.

    reference_log_ratio: log p_reference - log p_policy of each token, any shape; the result has the same shape.
    """
    return torch.expm1(reference_log_ratio) - reference_log_ratio


def _check_policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: int,
    reference_logprobs: Tensor | None,
    kl_coefficient: float,
) -> None:
    others = {"behaviour_logprobs": behaviour_logprobs, "advantages": advantages, "mask": mask}
    if reference_logprobs is not None:
        others["reference_logprobs"] = reference_logprobs
    faults = [
        f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}"
        for name, tensor in others.items()
        if tensor.shape != logprobs.shape
    ]
    if mask.dtype != torch.bool:
        faults.append(f"mask must be bool, not {mask.dtype}")
    if num_tokens < 1:
        faults.append(f"num_tokens must be at least 1, not {num_tokens}")
    if kl_coefficient and reference_logprobs is None:
        faults.append(f"kl_coefficient={kl_coefficient} needs reference_logprobs")
    if faults:
        raise ValueError("; ".join(faults))
