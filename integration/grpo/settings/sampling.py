"""The sections about what is sampled, in steps and in evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from .section import Fault, Section, not_among, not_positive, too_small

ON_COMMITS = ("verify", "keep", "drop")


@dataclass(frozen=True)
class RolloutSettings(Section):
    """The sampling of a step."""

    prompts_per_step: int = 32  # prompts of a step, over all ranks
    group_size: int = 16  # samples of each prompt
    max_new_tokens: int = 16  # longest sample, in tokens
    temperature: float = 1.0  # temperature of sampling, and of the engine's and the trainer's log-probabilities
    ahead: int = 0  # how many steps beyond the current one may be begun while it runs out, and with separate engines
    # while the trainer trains; 0: none
    on_commit: str = "verify"  # what a commit does with samples that were begun ahead: "verify" draws them again, so
    # that the run is the one with ahead=0; "keep" trains on samples of older weights; "drop" on those up to max_lag
    max_lag: int = 1  # for "keep" and "drop": largest number of commits between a sample's first token and its training
    keep_kv: bool = False  # for "keep" and "drop": go on with the KV of older weights; then logprob_gap is not 0.0
    shuffle_rewards: bool = False  # permute the rewards of a step's samples at random, as a control experiment

    @property
    def steps_begun_ahead(self) -> int:
        """Largest number of steps that are begun beyond the current one."""
        return min(self.ahead, self.max_lag) if self.on_commit == "keep" else self.ahead

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "prompts_per_step", "group_size", "max_new_tokens") + not_positive(self, "temperature")
        for name in ("ahead", "max_lag"):
            if getattr(self, name) < 0:
                found.append((name, f"must not be negative, not {getattr(self, name)}"))
        found += not_among(self, "on_commit", ON_COMMITS)
        if self.keep_kv and self.on_commit == "verify":
            found.append(("keep_kv", 'must be false with on_commit="verify", which computes all KV anew'))
        if self.group_size < 2:
            found.append(("group_size", "must be at least 2: advantages compare the samples of a group"))
        return found


@dataclass(frozen=True)
class EvalSettings(Section):
    """The evaluations on held-out problems, every `run.eval_every` steps. Their seeds are the same each time."""

    n: int = 1  # samples of each held-out problem
    temperature: float = 0.0  # temperature of their sampling; 0: greedy

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "n")
        if self.temperature < 0:
            found.append(("temperature", f"must not be negative, not {self.temperature}"))
        if self.n > 1 and not self.temperature:
            found.append(("temperature", f"must be positive with n={self.n}: greedy samples are all the same"))
        return found
