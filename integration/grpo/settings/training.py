"""The sections about training: loss, optimizer, adapters, ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, field

from .section import Fault, Section, bytes_of, negative, not_among, not_positive, too_small

SCHEDULES = ("constant", "linear", "cosine")
# The losses by name (`training/surrogates.py`), with the clip bounds, low and high, that each has where none are set.
CLIP_BOUNDS = {
    "token_mean": (0.2, 0.2), "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4),
    "cispo": (0.0, 4.0),
}  # fmt: skip
TRUNCATED = ("count", "mask")
BASELINES = ("group", "leave_one_out", "batch", "none")
# What advantages may be divided by, by what is subtracted from the rewards: a group of equal rewards has a standard
# deviation of 0, which is none to divide by unless its advantages are 0 too.
SCALES = {"group": ("group", "batch", "none"), "leave_one_out": ("group", "batch", "none"),
          "batch": ("batch", "none"), "none": ("none",)}  # fmt: skip
KL_PLACES = ("loss", "advantage")
LOW_PRECISIONS = ("masters", "stochastic", "nearest")
MAX_ZERO_STAGE = 3
MICROBATCH_SIZES = ("microbatch_tokens", "gradient_accumulation_steps", "microbatch_bytes")  # at most one may be set
DEFAULT_MICROBATCH_TOKENS = 16384


@dataclass(frozen=True)
class LoraSettings(Section):
    """Adapters in place of all weights: the base stays frozen, where the engine aliases it too."""

    rank: int = 0  # rank of the adapters that are trained; 0: all weights are trained and there are no adapters
    alpha: int = 16  # the adapters' results are scaled by alpha / rank
    targets: str = "all-linear"  # layers that get an adapter: names, separated by commas, or "all-linear": all but the
    # output

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "alpha")
        if self.rank < 0:
            found.append(("rank", f"must not be negative, not {self.rank}"))
        if not all(name.strip() for name in self.targets.split(",")):
            found.append(("targets", f"must be names separated by commas, not {self.targets!r}"))
        return found


@dataclass(frozen=True)
class TrainSettings(Section):
    """The optimizer and the loss of a step."""

    learning_rate: float = 5e-5  # learning rate of AdamW
    weight_decay: float = 0.0  # weight decay of AdamW
    low_precision: str = "masters"  # of bfloat16 weights: float32 "masters" in the optimizer, or "stochastic" rounding
    beta1: float = 0.9  # decay of AdamW's first moment
    beta2: float = 0.95  # decay of AdamW's second moment
    num_warmup_steps: int = 10  # steps over which the learning rate rises to its value
    schedule: str = "constant"  # of the learning rate after the warm-up: "constant", or "linear" or "cosine" to the end
    final_share: float = 0.0  # of learning_rate, what a "linear" or "cosine" schedule has at run.num_steps
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    epochs_per_step: int = 1  # passes over the samples of each step
    minibatches_per_step: int = 1  # parts of a step's samples, by whole groups, which have an optimizer step each in
    # every pass; ratios are to the weights before the first of them
    microbatch_tokens: int = 0  # rows of one micro-batch; a longer sample has one of its own. 0: 16384, unless one of
    # the next two is set
    gradient_accumulation_steps: int = 0  # number of micro-batches of an optimizer step on each rank, with samples
    # spread evenly by tokens; 0: as many as another setting gives
    microbatch_bytes: str = ""  # activations of one micro-batch ("2GiB"), by what small forwards keep; a larger sample
    # has one of its own
    share_prefixes: bool = True  # what samples of a micro-batch have in common from their beginning, as the prompt of a
    # group, goes through the model once, where its layers allow it: the same log-probabilities, less work
    skip_forward: bool = False  # samples that have no gradient, as in groups of equal rewards, have no backward pass;
    # true: no forward either, nor have those of later mini-batches one before the first optimizer step, so that their
    # gap is not measured
    gradient_checkpointing: bool = False  # keep each layer's input alone, and compute the rest again in the backward
    # pass: less memory, more time, the same bits
    loss: str = "token_mean"  # "token_mean": clipped surrogate, mean over the step's tokens; "grpo": mean over each
    # sample's tokens, then over samples; "dr_grpo": sum over tokens / (samples * max_new_tokens); "dapo": token mean
    # with a higher upper bound; "gspo": one ratio for each sample; "cispo": clipped weights of REINFORCE, token mean
    clip_low: float = 0.0  # the ratio is clipped from below at 1 - clip_low; 0: the loss's own, 0.2, but 3e-4 of "gspo"
    clip_high: float = 0.0  # the ratio is clipped from above at 1 + clip_high; 0: the loss's own, 0.2, but 0.28 of
    # "dapo", 4e-4 of "gspo", 4.0 of "cispo"
    truncated: str = "count"  # samples that max_new_tokens ended: "count" in the loss, or "mask": in their group's mean
    # only
    truncated_penalty: float = 0.0  # subtracted from their rewards before advantages; of metrics flat_groups has it
    overlong_tokens: int = 0  # last ones of rollout.max_new_tokens, over which truncated_penalty grows evenly from 0 to
    # its value, for samples that end there by themselves too; 0: only truncated samples have it
    importance_bound: float = 2.0  # largest weight p / p_behaviour of a token that older weights have drawn
    sequence_bound: float = 0.0  # samples of older weights whose product of ratios is beyond it count nothing; 0: all
    # count
    kl_coefficient: float = 0.0  # weight of the KL to the reference; 0: none
    kl_in: str = "loss"  # where it is: in the "loss", as an estimate with a gradient, or in each token's "advantage"
    reference: str = ""  # the model of the KL: a Hugging Face folder with the same tokens, say of a teacher; empty:
    # the model at the start, of which a copy is kept unless adapters are trained: then it is the base
    entropy_coefficient: float = 0.0  # weight of the tokens' entropy, which is added to what is maximised; 0: none
    baseline: str = "group"  # what is subtracted from a reward: the mean of its "group", the mean of the others of it
    # ("leave_one_out"), the mean of the step ("batch"), or nothing ("none")
    scale_rewards: str = "group"  # what that is divided by: the standard deviation of the rewards of its "group" or of
    # the step ("batch"), or nothing ("none"); must be "none" with "dr_grpo"
    lora: LoraSettings = field(default_factory=LoraSettings)

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "epochs_per_step", "minibatches_per_step") + self._microbatch_faults()
        found += not_among(self, "low_precision", LOW_PRECISIONS) + not_among(self, "schedule", SCHEDULES)
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                found.append((name, f"must be at least 0 and less than 1, not {value}"))
        if not 0 <= self.final_share <= 1:
            found.append(("final_share", f"must be from 0 to 1, not {self.final_share}"))
        found += not_positive(self, "learning_rate", "max_grad_norm", "importance_bound")
        found += negative(self, "weight_decay", "num_warmup_steps", "kl_coefficient")
        found += not_among(self, "kl_in", KL_PLACES) + self._advantage_faults()
        if self.sequence_bound and not self.sequence_bound > 1:
            found.append(("sequence_bound", f"must be 0 or more than 1, not {self.sequence_bound}"))
        found += not_among(self, "truncated", TRUNCATED) + self._loss_faults()
        return found + [(f"lora.{key}", why) for key, why in self.lora.faults()]

    def _microbatch_faults(self) -> list[Fault]:
        found = negative(self, "microbatch_tokens", "gradient_accumulation_steps")
        first, *others = [name for name in MICROBATCH_SIZES if getattr(self, name)] or [""]
        found += [
            (name, f"must not be set with train.{first}: both say how large micro-batches are") for name in others
        ]
        if self.microbatch_bytes:
            try:
                bytes_of(self.microbatch_bytes)
            except ValueError as error:
                found.append(("microbatch_bytes", str(error)))
        return found

    def _loss_faults(self) -> list[Fault]:
        found = not_among(self, "loss", tuple(CLIP_BOUNDS))
        found += negative(self, "clip_low", "clip_high", "truncated_penalty", "overlong_tokens")
        if self.loss == "cispo" and self.clip_low:
            found.append(("clip_low", 'must be 0 with loss="cispo", which bounds its weights from above alone'))
        if self.overlong_tokens > 0 and not self.truncated_penalty:
            found.append(("overlong_tokens", "needs truncated_penalty, which grows over them"))
        return found

    def _advantage_faults(self) -> list[Fault]:
        found = not_among(self, "baseline", BASELINES) + not_among(self, "scale_rewards", SCALES["group"])
        if found:
            return found
        if self.loss == "dr_grpo" and self.scale_rewards != "none":
            return [("scale_rewards", 'must be "none" with loss="dr_grpo", which divides advantages by nothing')]
        if self.scale_rewards not in (allowed := SCALES[self.baseline]):
            names = " or ".join(f'"{name}"' for name in allowed)
            why = "groups of equal rewards would be divided by a deviation of 0"
            return [("scale_rewards", f'must be {names} with baseline="{self.baseline}": {why}')]
        return []

    @property
    def compares_groups(self) -> bool:
        """Whether a sample's advantage is 0 where its group's rewards are all equal."""
        return self.baseline in ("group", "leave_one_out")

    @property
    def needs_whole_step(self) -> bool:
        """Whether advantages depend on rewards of other groups."""
        return "batch" in (self.baseline, self.scale_rewards)

    @property
    def num_optimizer_steps(self) -> int:
        """The number of optimizer steps on a step's samples."""
        return self.epochs_per_step * self.minibatches_per_step

    @property
    def has_teacher(self) -> bool:
        """Whether another model says what is better."""
        return self.kl_coefficient != 0.0 and bool(self.reference)

    @property
    def has_terms(self) -> bool:
        """Whether samples have a gradient also where their advantage is 0."""
        return self.kl_coefficient != 0.0 or self.entropy_coefficient != 0.0

    @property
    def num_microbatch_rows(self) -> int | None:
        """The most rows of a micro-batch, where rows are what limits it."""
        if self.gradient_accumulation_steps or self.microbatch_bytes:
            return None
        return self.microbatch_tokens or DEFAULT_MICROBATCH_TOKENS

    @property
    def num_microbatch_bytes(self) -> int | None:
        """The value of `microbatch_bytes` as a number, where it is set."""
        return bytes_of(self.microbatch_bytes) if self.microbatch_bytes else None

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The lower and the upper clip bound: those that are set, else the loss's own."""
        low, high = CLIP_BOUNDS[self.loss]
        return self.clip_low or low, self.clip_high or high


@dataclass(frozen=True)
class DeepSpeedSettings(Section):
    """The ZeRO stage of `trainer = "deepspeed"`."""

    zero_stage: int = 2  # sharded state: 0: none, 1: optimizer state, 2: gradients too, 3: parameters too

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        if 0 <= self.zero_stage <= MAX_ZERO_STAGE:
            return []
        return [("zero_stage", f"must be from 0 to {MAX_ZERO_STAGE}, not {self.zero_stage}")]
