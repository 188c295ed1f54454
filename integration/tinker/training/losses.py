"""The losses of the Tinker API, as pure functions of log-probabilities. They are sums over tokens, not means.

A datum may have `weights`, by which the losses of its tokens are multiplied; without, each weighs 1.

Letters: M tokens of all data, one after another, K targets of a position (1 for all losses but cross_entropy).

Sources: the API's documentation, tinker-docs.thinkingmachines.ai/tinker/losses, with its pages on each of them, and the
papers that it names: Schulman et al., "Proximal Policy Optimization", 2017, eq. 7; MiniMax, "MiniMax-M1", 2025, eq. 4
and 5 (CISPO); Richemond et al., "Offline Regularised Reinforcement Learning", 2024 (DRO); Zheng et al., "Group Sequence
Policy Optimization", 2025, section 4.3 (GSPO-token).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Config = Mapping[str, float]
Inputs = Mapping[str, Tensor]
_PPO_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # 0.2 on both sides, says the documentation
REFUSED = {
    "stable_reinforce": "the server records no stability information",
    "custom": "custom losses run at the client (forward_backward_custom with a function)",
}


@dataclass(frozen=True)
class Loss:
    """One loss: the loss of each token, what it reads, and its settings."""

    losses: Callable[[Tensor, Inputs, Sequence[int], Config], Tensor]
    required: tuple[str, ...] = ()  # float inputs of each datum besides its weights, one value a target
    config: Mapping[str, float | None] | None = None  # defaults; None: it must be given
    has_ratio: bool = False  # whether it reads the log-probabilities of what drew the tokens
    takes_several: bool = False  # whether a position may have several targets


def cross_entropy(logprobs: Tensor, inputs: Inputs, lengths: Sequence[int], config: Config) -> Tensor:
    """Compute -log p of each target, float32 [M] or [M, K]."""
    return -logprobs


def importance_sampling(logprobs: Tensor, inputs: Inputs, lengths: Sequence[int], config: Config) -> Tensor:
    """Compute -p / q * A of each token. logprobs: log p, with gradient; inputs: logprobs (log q) and advantages."""
    return -ratios(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, lengths: Sequence[int], config: Config) -> Tensor:
    """Compute -min(r * A, clip(r) * A) of each token, r = p / q. The bounds are those of the ratio itself."""
    return -_clipped(ratios(logprobs, inputs), inputs["advantages"], config)


def cispo(logprobs: Tensor, inputs: Inputs, lengths: Sequence[int], config: Config) -> Tensor:
    """Compute -clip(r) * log p * A of each token, without a gradient through the ratio."""
    clipped = ratios(logprobs, inputs).clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -clipped.detach() * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, lengths: Sequence[int], config: Config) -> Tensor:
    """Compute -(log p * A - beta / 2 * (log p - log q)^2) of each token."""
    distance = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * distance**2)


def gspo(logprobs: Tensor, inputs: Inputs, lengths: Sequence[int], config: Config) -> Tensor:
    """Compute the clipped terms with the value of one ratio a datum, and each token's own gradient.

    The ratio is the geometric mean over the tokens whose `sequence_ratio_mask` is not 0. lengths: tokens of each datum.
    """
    log_ratio, counts = (logprobs - inputs["logprobs"]).detach(), inputs["sequence_ratio_mask"] != 0
    means = [
        part[its].mean() for part, its in zip(log_ratio.split(list(lengths)), counts.split(list(lengths)), strict=True)
    ]
    repeats = torch.tensor(lengths, device=logprobs.device)
    ratio = torch.exp(torch.stack(means).repeat_interleave(repeats) + logprobs - logprobs.detach())
    return -_clipped(ratio, inputs["advantages"], config)


def ratios(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Compute p / q of each token: exactly 1.0 where both have the same bits."""
    return torch.exp(logprobs - inputs["logprobs"])


def _clipped(ratio: Tensor, advantages: Tensor, config: Config) -> Tensor:
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return torch.minimum(ratio * advantages, clipped * advantages)


_OF_POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(cross_entropy, takes_several=True),
    "importance_sampling": Loss(importance_sampling, _OF_POLICY, has_ratio=True),
    "ppo": Loss(ppo, _OF_POLICY, _PPO_BOUNDS, has_ratio=True),
    "cispo": Loss(cispo, _OF_POLICY, _PPO_BOUNDS, has_ratio=True),
    "dro": Loss(dro, _OF_POLICY, {"beta": None}, has_ratio=True),
    "gspo": Loss(
        gspo,
        (*_OF_POLICY, "sequence_ratio_mask"),
        {"clip_low_threshold": None, "clip_high_threshold": None},
        has_ratio=True,
    ),
}


def loss_named(name: str) -> Loss:
    """Return a loss. Raises ValueError for a name that is none, and says why for those that this server has not."""
    if name in REFUSED:
        raise ValueError(f"loss_fn {name!r} is not supported: {REFUSED[name]}")
    if name not in LOSSES:
        raise ValueError(f"loss_fn must be one of {', '.join(LOSSES)}, not {name[:100]!r}")
    return LOSSES[name]


def settings_of(name: str, loss: Loss, given: Mapping[str, float | str]) -> dict[str, float]:
    """Return the settings of a loss, with its defaults. Raises ValueError naming an unknown, missing or wrong one."""
    known = dict(loss.config or {})
    if unknown := sorted(given.keys() - known.keys()):
        takes = ", ".join(known) or "none"
        raise ValueError(f"loss_fn_config: {name} has no setting {', '.join(unknown)[:200]}; it takes {takes}")
    found: dict[str, float] = {}
    for key, default in known.items():
        value = given.get(key, default)
        if value is None:
            raise ValueError(f"loss_fn_config: {name} needs {key}")
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"loss_fn_config: {key} must be a number of 0 or more, not {value!r:.100}")
        found[key] = float(value)
    if "clip_low_threshold" in found and not found["clip_low_threshold"] <= found["clip_high_threshold"]:
        raise ValueError("loss_fn_config: clip_low_threshold is above clip_high_threshold")
    return found
