"""Numbers that say what a step sampled: lengths, truncation, entropy, spread of the rewards, successes."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ....rollout.completion import Completion
from ..rewards.score import Score

REWARD = "eval_reward_mean"  # the name of an evaluation's mean reward


def of_evaluation(metric: str, name: str) -> str:
    """Return the name that a metric has of an evaluation of the table `evaluations`; empty: of the held-out one."""
    return f"{metric}/{name}" if name else metric


@dataclass(frozen=True)
class SampleNumbers:
    """One sample in numbers, so that the ranks need not exchange the samples themselves."""

    num_tokens: int
    sum_logprobs: float
    is_truncated: bool
    reward: float
    compared: float  # the reward less the penalty of its length, as advantages compare it
    components: Mapping[str, float]
    is_success: bool | None
    source_name: str = ""  # of its problem, where there are several


def is_truncated(completion: Completion) -> bool:
    """Return whether the largest number of new tokens has ended a sample."""
    return completion.finish_reason is not None and completion.finish_reason.type == "length"


@dataclass(frozen=True)
class LengthPenalty:
    """A penalty that is subtracted from the reward of a sample that is too long.

    Source of the even growth: Yu et al., "DAPO", 2025, eq. 13 (arXiv 2503.14476).
    """

    value: float = 0.0  # of a sample that the largest number of new tokens has ended
    num_tokens: int = 0  # last ones of these, over which the penalty grows from 0 to its value; 0: it does not grow
    max_new_tokens: int = 0

    def of(self, completion: Completion) -> float:
        """Return the penalty of one sample."""
        if is_truncated(completion):
            return self.value
        num_over = len(completion.token_ids) - (self.max_new_tokens - self.num_tokens)
        return self.value * num_over / self.num_tokens if self.num_tokens and num_over > 0 else 0.0


def compared_reward(completion: Completion, score: Score, penalty: LengthPenalty) -> float:
    """Return a sample's reward as advantages compare it."""
    return score.total - penalty.of(completion)


def is_flat(compared: Iterable[float]) -> bool:
    """Return whether a group teaches nothing: whether its compared rewards are all equal, in the float32 of
    advantages."""
    return len(set(array("f", compared))) == 1


def numbers_of(
    completion: Completion, score: Score, penalty: LengthPenalty | None = None, source_name: str = ""
) -> SampleNumbers:
    """Return the numbers of one sample."""
    sum_logprobs = math.fsum(completion.logprobs)
    return SampleNumbers(
        len(completion.token_ids),
        sum_logprobs,
        is_truncated(completion),
        score.total,
        compared_reward(completion, score, penalty or LengthPenalty()),
        dict(score.components),
        score.is_success,
        source_name,
    )


def step_statistics(samples: Sequence[SampleNumbers], group_size: int) -> dict[str, object]:
    """Return the statistics of one step, as metrics.jsonl names them. samples: of all ranks, group by group.

    entropy: mean of -log p of the sampled tokens, in nats: an unbiased estimate of the entropy of what was sampled
    from. flat_groups: share of the groups whose rewards, less the penalty of truncated samples, are all equal, so that
    they teach nothing. pass@k: share of the groups of k with a success, where the reward names successes. source/NAME:
    of the samples of one of several sources, if the step has some.
    """
    groups = [samples[at : at + group_size] for at in range(0, len(samples), group_size)]
    lengths, rewards = [one.num_tokens for one in samples], [one.reward for one in samples]
    found: dict[str, object] = {
        "reward_std": statistics.pstdev(rewards),
        "flat_groups": sum(is_flat(one.compared for one in group) for group in groups) / len(groups),
        "length_mean": statistics.fmean(lengths),
        "length_min": min(lengths),
        "length_max": max(lengths),
        "truncated_share": sum(one.is_truncated for one in samples) / len(samples),
        "entropy": -math.fsum(one.sum_logprobs for one in samples) / max(sum(lengths), 1),
    }
    for name in sorted({name for one in samples for name in one.components}):
        its = [one.components[name] for one in samples if name in one.components]
        found[f"reward/{name}"] = statistics.fmean(its)
    if (successes := num_successes(groups)) is not None:
        found["success"] = sum(successes) / len(samples)
        found[f"pass@{group_size}"] = statistics.fmean(num > 0 for num in successes)
    for name in sorted({one.source_name for one in samples} - {""}):
        its_groups = [group for group in groups if group[0].source_name == name]
        its_rewards = [one.reward for group in its_groups for one in group]
        found[f"source/{name}/reward_mean"] = statistics.fmean(its_rewards)
        if (successes := num_successes(its_groups)) is not None:
            found[f"source/{name}/success"] = sum(successes) / len(its_rewards)
    return found


def num_successes(groups: Sequence[Sequence[SampleNumbers]]) -> list[int] | None:
    """Count the successes of each group; None where the reward does not name them."""
    if any(one.is_success is None for group in groups for one in group):
        return None
    return [sum(bool(one.is_success) for one in group) for group in groups]


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is a success, from n >= k samples of which c are.

    The estimate is unbiased: 1 - C(n - c, k) / C(n, k). Source: Chen et al., "Evaluating Large Language Models Trained
    on Code", 2021, section 2.1 (arXiv 2107.03374). Raises ValueError for k beyond n, or c beyond it.
    """
    if not 0 < k <= num_samples or not 0 <= num_successes <= num_samples:
        raise ValueError(f"pass@{k} of {num_successes} successes among {num_samples} samples is not defined")
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)
