"""The sections about what is sampled, in steps and in evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ....rollout.sampling_params import SamplingParams
from .reading import nearest
from .section import Fault, Section, negative, not_among, not_positive, too_small

ON_COMMITS = ("verify", "keep", "drop")
# Sampling parameters that have keys of their own.
OWN_KEYS = {
    "n": "rollout.group_size",
    "sampling_seed": "run.seed",
    "temperature": "rollout.temperature",
    "max_new_tokens": "rollout.max_new_tokens",
}
_NAMES = [one.name for one in fields(SamplingParams) if one.name not in OWN_KEYS]
_UNBOUNDED = 2**62  # tokens


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
    redraw: int = 0  # number of further draws of a step, which replace groups whose rewards are all equal by groups of
    # other prompts; 0: those groups stay
    reward_timeout_s: float = 0.0  # longest time of one call of an async reward, or of an episode, in seconds; 0: none.
    # A function that is not async cannot be stopped: the log names it
    sampling: dict[str, object] = field(default_factory=dict)  # further fields of SamplingParams, of steps, evaluations
    # and an environment's turns: stop, top_p, json_schema, ...

    @property
    def steps_begun_ahead(self) -> int:
        """Largest number of steps that are begun beyond the current one."""
        return min(self.ahead, self.max_lag) if self.on_commit == "keep" else self.ahead

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "prompts_per_step", "group_size", "max_new_tokens") + not_positive(self, "temperature")
        for name in ("ahead", "max_lag", "redraw"):
            if getattr(self, name) < 0:
                found.append((name, f"must not be negative, not {getattr(self, name)}"))
        if not 0 <= self.reward_timeout_s < float("inf"):
            found.append(("reward_timeout_s", f"must not be negative, not {self.reward_timeout_s}"))
        found += not_among(self, "on_commit", ON_COMMITS)
        if self.keep_kv and self.on_commit == "verify":
            found.append(("keep_kv", 'must be false with on_commit="verify", which computes all KV anew'))
        return found + self._sampling_faults()

    def _sampling_faults(self) -> list[Fault]:
        found = [
            (f"sampling.{name}", f"must not be set: it is {OWN_KEYS[name]}")
            for name in self.sampling
            if name in OWN_KEYS
        ]
        others = [name for name in self.sampling if name not in OWN_KEYS]
        found += [
            (f"sampling.{name}", f"is no field of SamplingParams{nearest(name, 'rollout.sampling.', _NAMES)}")
            for name in others
            if name not in _NAMES
        ]
        for name in others:
            if name in _NAMES:
                found += _refused({name: self.sampling[name]}, _UNBOUNDED)
        # Only now those that do not go together.
        return found or (_refused(self.sampling, self.max_new_tokens) if self.max_new_tokens > 0 else [])

    def params(self, seed: int, *, n: int | None = None, temperature: float | None = None) -> SamplingParams:
        """Return the parameters of one prompt. n, temperature: of an evaluation; None: those of a step."""
        given: dict[str, Any] = dict(self.sampling)
        return SamplingParams(
            n=self.group_size if n is None else n,
            temperature=self.temperature if temperature is None else temperature,
            max_new_tokens=self.max_new_tokens,
            sampling_seed=seed,
            **given,
        )


@dataclass(frozen=True)
class EvalSettings(Section):
    """The evaluations on held-out problems, every `run.eval_every` steps. Their seeds are the same each time."""

    n: int = 1  # samples of each held-out problem
    temperature: float = 0.0  # temperature of their sampling; 0: greedy

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return _wrong_samples(self)


@dataclass(frozen=True)
class EvaluationSettings(Section):
    """A further evaluation, on rows of its own, whose metrics end with its name: `eval_reward_mean/NAME`. Its seeds are
    the same each time, and others than those of other evaluations."""

    path: str  # file of its rows, JSONL or Parquet
    num: int = 512  # largest number of rows: the first ones of the file
    n: int = 1  # samples of each row
    temperature: float = 0.0  # temperature of their sampling; 0: greedy
    every: int = 0  # steps between its evaluations; 0: run.eval_every. The first and the last step always have one
    prompt_field: str = ""  # field of a row that has the prompt; empty: data.prompt_field
    answer_field: str = ""  # field of a row that has the answer; empty: data.answer_field

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = [] if self.path else [("path", "must name a file")]
        return found + too_small(self, "num") + negative(self, "every") + _wrong_samples(self)


def _wrong_samples(settings: EvalSettings | EvaluationSettings) -> list[Fault]:
    """List what is wrong with the number of an evaluation's samples, and with their temperature."""
    found = too_small(settings, "n")
    if settings.temperature < 0:
        found.append(("temperature", f"must not be negative, not {settings.temperature}"))
    if settings.n > 1 and not settings.temperature:
        found.append(("temperature", f"must be positive with n={settings.n}: greedy samples are all the same"))
    return found


def _refused(sampling: dict[str, Any], max_new_tokens: int) -> list[Fault]:
    """List what is wrong with sampling parameters."""
    try:
        SamplingParams(**sampling, max_new_tokens=max_new_tokens)
    except ValueError as error:
        name, _, why = str(error).removeprefix("sampling parameters: ").partition(" ")
        return [(f"sampling.{name}", why)]
    return []
