"""Advantages as pure functions: what a sample's reward is compared with.

Dimension letters: P prompts, G samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_EPSILON = 1e-6


@dataclass(frozen=True)
class StepRewards:
    """The rewards of a whole step, as advantages need them."""

    mean: float
    deviation: float  # of the population
    are_equal: bool

    @classmethod
    def of(cls, rewards: Sequence[float]) -> StepRewards:
        """Summarise at least one reward."""
        values = torch.tensor(rewards, dtype=torch.float64)
        return cls(values.mean().item(), values.std(correction=0).item(), bool(values.min() == values.max()))


def group_advantages(
    rewards: Tensor, baseline: str = "group", scale: str = "group", of_step: StepRewards | None = None,
    epsilon: float = _EPSILON,
) -> Tensor:  # fmt: skip
    """Compute (reward - baseline) / (standard deviation + epsilon) of each sample.

    rewards: [P, G], floating point. baseline: "group": the mean of a prompt's samples; "leave_one_out": the mean of its
    other samples (G must be at least 2); "batch": the mean of the step; "none": 0. scale: the standard deviation, of
    the population, of the "group" or of the step ("batch"), or "none": nothing is divided. of_step: the rewards of the
    whole step, where one of both is "batch".

    Returns [P, G]. A group whose rewards are all equal has advantages of exactly zero if it is compared with itself.

    Raises ValueError for rewards of another shape or type, and for those of a step that are missing.

    Sources: GRPO, Shao et al., "DeepSeekMath", 2024, section 4.1.2 (arXiv 2402.03300); without the division: Liu et
    al., "Understanding R1-Zero-Like Training", 2025 (Dr. GRPO, arXiv 2503.20783), which shows that it favours prompts
    that are nearly always or nearly never solved. Leave one out: Ahmadian et al., "Back to Basics", 2024, section 3.2
    (RLOO, arXiv 2402.14740). Mean and deviation of the batch: Hu et al., "REINFORCE++", 2025 (arXiv 2501.03262). Mean
    of the group, deviation of the batch: Liu et al., "Part I: Tricks or Traps?", 2025 (arXiv 2508.08221).
    """
    if rewards.dim() != 2 or rewards.numel() == 0 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be a non-empty floating-point [prompts, samples], not {rewards.dtype} {tuple(rewards.shape)}"
        )
    if of_step is None:
        if "batch" in (baseline, scale):
            raise ValueError(f"baseline={baseline!r} and scale={scale!r} need the rewards of the step")
        of_step = StepRewards(0.0, 0.0, are_equal=False)
    compared = baseline in ("group", "leave_one_out")
    if compared:
        centred = rewards - rewards.mean(dim=1, keepdim=True)
    else:
        centred = rewards - of_step.mean if baseline == "batch" else rewards
    if baseline == "leave_one_out":
        if (size := rewards.shape[1]) < 2:
            raise ValueError(f'baseline="leave_one_out" needs groups of at least 2 samples, not {size}')
        centred = centred * (size / (size - 1))
    if scale == "group":
        centred = centred / (rewards.std(dim=1, correction=0, keepdim=True) + epsilon)
    elif scale == "batch":
        centred = centred / (of_step.deviation + epsilon)
    # The mean of equal rewards may differ from them by a rounding error, which the division would magnify.
    if compared:
        return centred.masked_fill(rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True), 0.0)
    if baseline == "batch" and of_step.are_equal:
        return torch.zeros_like(rewards)
    return centred
