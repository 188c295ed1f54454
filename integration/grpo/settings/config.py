"""The job's settings: TOML plus `key=value`. Every fault is reported by its key before heavy libraries are imported."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ....rollout.config import EngineConfig
from ....rollout.sampling_params import GRAMMARS
from .reading import apply_override, build
from .sampling import EvalSettings, EvaluationSettings, RolloutSettings
from .section import Fault, Section, faults_by_name, not_among
from .sections import (
    CheckpointSettings,
    DataSettings,
    EngineSettings,
    HttpSettings,
    ModelSettings,
    ParallelSettings,
    RunSettings,
    WarmStartSettings,
    WeightSettings,
)
from .training import DeepSpeedSettings, TrainSettings

TRAINERS = ("ddp", "fsdp2", "deepspeed")
SYNCS = ("in_place", "distributed", "tensor", "disk", "delta")
ENGINES = ("local", "separate")
_DEFAULT_REWARD = "exact_answer"
_CONFIGS = Path(__file__).parents[3] / "configs"  # that the package brings


@dataclass(frozen=True)
class JobConfig:
    """All settings of one training job."""

    run: RunSettings
    model: ModelSettings = field(default_factory=ModelSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    data: DataSettings = field(default_factory=DataSettings)
    reward: str | list[str] = _DEFAULT_REWARD  # the reward function, as module:function, file.py:function or the name
    # of a ready one; or a list of several, whose values are added
    reward_weights: dict[str, float] = field(default_factory=dict)  # weights of rewards or of their components, by
    # name; 1.0 where nothing is said
    reward_options: dict[str, dict[str, object]] = field(default_factory=dict)  # of each reward, by its name: settings
    # that it gets as keywords
    environment: str = ""  # an environment of several turns in place of a reward, as module:function or
    # file.py:function; empty: a sample is one answer to a row's prompt
    environment_options: dict[str, object] = field(default_factory=dict)  # settings that it gets as keywords
    trainer: str = "ddp"  # how the model is trained on several ranks: "ddp", "fsdp2" or "deepspeed"
    sync: str = "in_place"  # how engines get the weights: "in_place", "distributed", "tensor", "disk" or "delta"
    engines: str = "local"  # "local": in the trainer's processes; "separate": in processes of their own
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    evaluations: dict[str, EvaluationSettings] = field(default_factory=dict)  # further ones, by name
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    deepspeed: DeepSpeedSettings = field(default_factory=DeepSpeedSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    weights: WeightSettings = field(default_factory=WeightSettings)
    http: HttpSettings = field(default_factory=HttpSettings)

    def __post_init__(self) -> None:
        if self.warm_start.enabled is None:  # the class is frozen for its users; here the default gets its value, once
            object.__setattr__(self, "warm_start", replace(self.warm_start, enabled=not self.model.path))
        sections = {name: value for name, value in vars(self).items() if isinstance(value, Section)}
        found = [(f"{name}.{key}", why) for name, section in sections.items() for key, why in section.all_faults()]
        found += faults_by_name(self.evaluations, "evaluations")
        for name, choices in (("trainer", TRAINERS), ("sync", SYNCS), ("engines", ENGINES)):
            found += not_among(self, name, choices)
        if wrong := [f"{key} {why}" for key, why in found + self._contradictions()]:
            raise ValueError("; ".join(wrong))

    def _contradictions(self) -> list[Fault]:
        """List the settings that another section's settings do not allow."""
        found: list[Fault] = []
        if self.engines == "separate" and self.sync == "in_place":
            found.append(("sync", 'must not be "in_place" with engines="separate": their weights have to travel'))
        if self.parallel.num_ranks > 1 and self.sync != "in_place":
            why = "with parallel.tp or parallel.pp each rank takes its part of what the trainer has in the same ranks"
            found.append(("sync", f'must be "in_place", not {self.sync!r}: {why}'))
        tp, k_blocks = self.parallel.tp, self.engine.k_blocks
        if self.engine.invariant and tp > 0 and k_blocks % tp:
            why = f"must be a multiple of parallel.tp={tp} in invariant mode, not {k_blocks}"
            found.append(("engine.k_blocks", why))
        if not self.rewards:
            found.append(("reward", "must name at least one function"))
        if self.train.lora.rank:
            found += self._refused_with_adapters()
        num = self.rollout.prompts_per_step * self.rollout.group_size // max(self.train.minibatches_per_step, 1)
        if self.train.gradient_accumulation_steps > num:
            why = (
                f"must be at most the {num} samples of an optimizer step, not {self.train.gradient_accumulation_steps}"
            )
            found.append(("train.gradient_accumulation_steps", why))
        if self.train.low_precision != "masters":
            found += self._refused_precision()
        found += self._refused_advantages()
        if self.warm_start.enabled == bool(self.model.path):
            given = "false with model.path" if self.model.path else "true without model.path"
            found.append(("warm_start.enabled", f"must be {given}: the built model is warm-started, and no other"))
        if self.rollout.redraw and self.depends_on_timing:
            why = f'must be 0 with rollout.ahead and rollout.on_commit="{self.rollout.on_commit}", only "verify" has it'
            found.append(("rollout.redraw", why))
        if self.run.replay_schedule and not self.depends_on_timing:
            why = 'repeats runs with rollout.ahead and rollout.on_commit "keep" or "drop": others need no schedule'
            found.append(("run.replay_schedule", why))
        if self.run.replay_schedule and (grammars := [name for name in GRAMMARS if name in self.rollout.sampling]):
            why = "must not be set with run.replay_schedule: answers that a grammar constrains are not drawn in parts"
            found.append((f"rollout.sampling.{grammars[0]}", why))
        if self.run.replay_schedule and self.rollout.keep_kv:
            found.append(("rollout.keep_kv", "must be false with run.replay_schedule, which computes all KV anew"))
        if self.rollout.keep_kv and self.engines != "separate":
            found.append(
                ("rollout.keep_kv", 'needs engines="separate": others release their KV while the trainer trains')
            )
        if (best_by := self.checkpoints.best_by) and best_by not in self.evaluations:
            names = f", which has {', '.join(self.evaluations)}" if self.evaluations else ""
            found.append(("checkpoints.best_by", f"must be a name of the table evaluations{names}, not {best_by!r}"))
        if self.http.port and self.engines == "separate":
            found.append(("http.port", 'must be 0 with engines="separate": they are not in the ranks'))
        return found + self._refused_with_environment()

    def _refused_advantages(self) -> list[Fault]:
        """List what does not go with the way in which rewards are compared, and samples are divided."""
        train, rollout, found = self.train, self.rollout, list[Fault]()
        if train.compares_groups and rollout.group_size == 1:
            why = f'must be at least 2 with train.baseline="{train.baseline}": the samples of a group are compared'
            found.append(("rollout.group_size", why))
        is_taught = train.kl_in == "advantage" and train.kl_coefficient != 0.0
        if rollout.redraw and (is_taught or not train.compares_groups):
            setting = 'train.kl_in="advantage"' if is_taught else f'train.baseline="{train.baseline}"'
            found.append(("rollout.redraw", f"must be 0 with {setting}: groups of equal rewards teach something"))
        if is_taught and train.loss == "gspo":
            why = 'must be "loss" with train.loss="gspo", whose one ratio for a sample would give each token their mean'
            found.append(("train.kl_in", why))
        if train.minibatches_per_step > 0 and rollout.prompts_per_step % train.minibatches_per_step:
            num, why = train.minibatches_per_step, "mini-batches have as many whole groups each"
            found.append(("rollout.prompts_per_step", f"must divide by train.minibatches_per_step={num}: {why}"))
        if train.overlong_tokens >= rollout.max_new_tokens > 0:
            why = f"must be less than rollout.max_new_tokens={rollout.max_new_tokens}, not {train.overlong_tokens}"
            found.append(("train.overlong_tokens", why))
        return found

    def _refused_with_environment(self) -> list[Fault]:
        """List the settings that an environment of several turns does not go with."""
        if not self.environment:
            return [("environment_options", "needs environment")] if self.environment_options else []
        found: list[Fault] = []
        if self.reward != _DEFAULT_REWARD or self.reward_options:
            found.append(("reward", "must not be set with environment, which gives the rewards itself"))
        if self.engines == "separate":
            found.append(("engines", 'must be "local" with environment: its turns are asked in the trainer\'s process'))
        if self.parallel.num_ranks > 1:
            found.append(("parallel", "must have tp=1 and pp=1 with environment, whose turns one rank asks for"))
        if self.data.too_long == "drop":
            why = 'must not be "drop" with environment, whose prompts are its own: `session.room` says what fits'
            found.append(("data.too_long", why))
        if self.train.overlong_tokens:
            found.append(("train.overlong_tokens", "must be 0 with environment, whose answers are of several turns"))
        if self.rollout.ahead and self.rollout.on_commit != "verify":
            found.append(("rollout.on_commit", 'must be "verify" with environment: its episodes are played again'))
        return found

    @property
    def rewards(self) -> list[str]:
        """The locations of the rewards."""
        return [self.reward] if isinstance(self.reward, str) else self.reward

    def _refused_precision(self) -> list[Fault]:
        name, given = "train.low_precision", self.train.low_precision
        if given == "nearest" and self.model.dtype == "bfloat16" and not self.train.lora.rank:
            why = (
                f'"nearest" would lose updates: with a learning rate of {self.train.learning_rate:g} most of them are '
                'smaller than half a step of bfloat16. Take "masters" or "stochastic", or model.dtype="float32"'
            )
            return [(name, why)]
        if given == "stochastic" and self.trainer == "deepspeed":
            return [(name, 'must be "masters" with trainer="deepspeed", which keeps float32 copies itself')]
        return []

    def _refused_with_adapters(self) -> list[Fault]:
        needed = {"trainer": "ddp", "sync": "in_place", "engines": "local"}
        ones = {
            "parallel.tp": self.parallel.tp,
            "parallel.pp": self.parallel.pp,
            "engine.k_blocks": self.engine.k_blocks,
        }
        why = "with train.lora the engine aliases the trainer's module"
        found = [
            (name, f'must be "{value}", not {getattr(self, name)!r}: {why}')
            for name, value in needed.items()
            if getattr(self, name) != value
        ]
        return found + [(name, f"must be 1, not {value}: {why}, whole") for name, value in ones.items() if value != 1]

    @property
    def folder(self) -> Path:
        """The folder of the run's results."""
        return Path(self.run.dir) / self.run.name

    @property
    def data_files(self) -> dict[str, str]:
        """The files of problems, by the keys that name them."""
        data = self.data
        named = {
            "data.path": data.path, "data.heldout_path": data.heldout_path, "data.few_shot_path": data.few_shot_path,
        }  # fmt: skip
        named |= {f"data.sources.{name}.path": one.path for name, one in data.sources.items()}
        named |= {f"evaluations.{name}.path": one.path for name, one in self.evaluations.items()}
        return {key: path for key, path in named.items() if path}

    @property
    def depends_on_timing(self) -> bool:
        """Whether samples are kept that older weights have drawn."""
        return self.rollout.steps_begun_ahead > 0 and self.rollout.on_commit != "verify"

    @property
    def in_flight(self) -> Literal["verify"] | None:
        """The treatment of the samples of coming steps at a commit, as the weight verbs name it."""
        return "verify" if self.rollout.ahead and self.rollout.on_commit == "verify" else None

    def engine_config(self) -> EngineConfig:
        """Build the settings of each rank's engine. Raises ValueError naming the values that are out of range."""
        settings = self.engine
        return EngineConfig(
            kv_cache=settings.kv_cache,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            invariant=settings.invariant,
            seed=self.run.seed,
            tp=self.parallel.tp,
            pp=self.parallel.pp,
            k_blocks=settings.k_blocks,
            sequence_pipelining=settings.sequence_pipelining,
            rank_timeout_s=settings.rank_timeout_s,
            speculation=settings.speculation,
            receipts=self._receipts,
        )

    @property
    def _receipts(self) -> str:
        """The receipts of samples that are kept; those of several turns are no parts of a kept sample as they stand."""
        if not self.run.rollouts_every:
            return "off"
        return "tokens" if self.environment else "digests"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a TOML file and apply `section.key=value` overrides in order.

    Values of overrides are read as TOML, or as plain text where they are not TOML. Raises ValueError naming every
    unknown key, missing key and wrong type at once.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        hint = f"; the package's own is {own}" if (own := _CONFIGS / Path(path).name).is_file() else ""
        raise ValueError(f"config {str(path)!r} cannot be read: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits
        raise ValueError(f"config {str(path)!r} is not TOML: {error}") from error
    for override in overrides:
        apply_override(values, override)
    faults: list[str] = []
    config = build(JobConfig, values, "", faults)
    if faults:
        raise ValueError("; ".join(faults))
    return config
