"""The sections of the job's settings. Each checks the ranges of its own values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....rollout.config import parse_kv_size

DTYPES = ("float32", "bfloat16")
SCHEDULES = ("constant", "linear", "cosine")
# The losses by name (`training/surrogates.py`), with the clip bounds, low and high, that each has where none are set.
CLIP_BOUNDS = {
    "token_mean": (0.2, 0.2), "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4),
    "cispo": (0.0, 4.0),
}  # fmt: skip
TRUNCATED = ("count", "mask")
LOW_PRECISIONS = ("masters", "stochastic", "nearest")
ON_COMMITS = ("verify", "keep", "drop")
UNDOS = ("tensors", "none")
MAX_ZERO_STAGE = 3

Fault = tuple[str, str]  # a key, and the reason for which its value is refused


class Section(ABC):
    """One table of the job's TOML."""

    @abstractmethod
    def faults(self) -> list[Fault]:
        """List every value that is out of range, by its key in this section."""


@dataclass(frozen=True)
class RunSettings(Section):
    """The length of the run and the folder of its results."""

    name: str  # name of the run; results go to the folder of this name in run.dir
    dir: str = "runs"  # folder for the results of all runs
    seed: int = 0  # seed of every random choice
    num_ranks: int = 0  # number of ranks that the config is made for; 0: any number
    num_steps: int = 80  # number of GRPO steps
    eval_every: int = 10  # steps between held-out evaluations; the first and the last step always have one
    checkpoint_every: int = 20  # steps between checkpoints
    tensorboard: bool = False  # also write TensorBoard events
    replay_schedule: str = ""  # schedule.jsonl of a run with rollout.on_commit "keep" or "drop": each token is drawn
    # under the commit that drew it there, so that the digests are those of that run
    timeout_s: int = 120  # longest time that a rank waits for the others in a collective
    rollouts_every: int = 1  # steps between those whose samples are kept in the folder `rollouts`; 0: none are
    rollouts_keep: int = 200  # number of newest steps whose samples are kept; 0: all

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "num_steps", "eval_every", "checkpoint_every", "timeout_s")
        for name in ("num_ranks", "rollouts_every", "rollouts_keep"):
            if (value := getattr(self, name)) < 0:
                found.append((name, f"must not be negative, not {value}"))
        if not self.name or "/" in self.name:
            found.append(("name", f"must be a folder name, not {self.name!r}"))
        return found


@dataclass(frozen=True)
class ModelSettings(Section):
    """The model: a folder in Hugging Face format, or, without a path, a small one that is built and warm-started."""

    path: str = ""  # a Hugging Face folder; empty: a small model is built with the sizes below
    family: str = "qwen3"  # of the built model: "qwen3" or "qwen3_5" (gated delta nets in most layers)
    dtype: str = "float32"  # type of the parameters: "float32" or "bfloat16"
    hidden_size: int = 128  # width of the built model
    intermediate_size: int = 256  # width of the built model's MLP
    num_layers: int = 4  # layers of the built model
    num_heads: int = 4  # query heads of the built model
    num_kv_heads: int = 2  # key and value heads of the built model
    head_dim: int = 32  # size of each head of the built model

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        return (
            too_small(self, *sizes) + not_among(self, "dtype", DTYPES) + not_among(self, "family", ("qwen3", "qwen3_5"))
        )


@dataclass(frozen=True)
class WarmStartSettings(Section):
    """Supervised steps on worked examples that make the built model a weak solver. The result is cached."""

    enabled: bool = True  # warm-start the built model
    cache_dir: str = ".cache/lockstep"  # folder for warm-started models
    num_steps: int = 300  # number of supervised steps
    batch_size: int = 128  # examples in a supervised step, over all ranks
    learning_rate: float = 4e-3  # largest learning rate of the warm start
    slip_rate: float = 0.75  # probability with which a worked example forgets a carry

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "num_steps", "batch_size") + not_positive(self, "learning_rate")
        if not 0 <= self.slip_rate <= 1:
            found.append(("slip_rate", f"must be from 0 to 1, not {self.slip_rate}"))
        return found


@dataclass(frozen=True)
class DataSettings(Section):
    """The problems: generated sums of three-digit numbers, or, with a path, one problem per line of a JSONL file."""

    path: str = ""  # JSONL file, one problem a line; empty: generated sums
    heldout_path: str = ""  # JSONL file of held-out problems; empty: every tenth problem of `path` is held out
    prompt_field: str = "prompt"  # field of a line that has the prompt
    answer_field: str = "answer"  # field of a line that has the answer; empty: rows have none, the reward reads the row
    min_digits: int = 3  # least number of digits of each number to add
    max_digits: int = 3  # largest number of digits of each number to add
    num_heldout: int = 512  # largest number of held-out problems
    chat: bool = False  # a prompt that is text becomes a user's message; prompts that are messages do so in any case
    system_prompt: str = ""  # system message before the messages of each prompt; needs chat, or messages
    few_shot_path: str = ""  # JSONL file of rows that are shown, with their answers, before each prompt
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)  # variables of the model's chat template

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "num_heldout")
        names = ("chat", "system_prompt", "few_shot_path", "chat_template_kwargs")
        found += [(name, "needs data.path") for name in names if getattr(self, name) and not self.path]
        if self.heldout_path and not self.path:
            found.append(("heldout_path", "needs data.path"))
        return found


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


@dataclass(frozen=True)
class CheckpointSettings(Section):
    """The files of a run's weights that stay. `run.checkpoint_every` says how often a checkpoint is written."""

    keep: int = 2  # number of newest checkpoints that stay; 0: all
    best: bool = False  # also keep the model of the evaluation with the largest mean reward, in the folder `best`

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return [("keep", f"must not be negative, not {self.keep}")] if self.keep < 0 else []


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
    epochs_per_step: int = 1  # optimizer steps on each batch of samples
    microbatch_tokens: int = 16384  # rows of one micro-batch; a longer sample has a micro-batch of its own
    loss: str = "token_mean"  # "token_mean": clipped surrogate, mean over the step's tokens; "grpo": mean over each
    # sample's tokens, then over samples; "dr_grpo": sum over tokens / (samples * max_new_tokens); "dapo": token mean
    # with a higher upper bound; "gspo": one ratio for each sample; "cispo": clipped weights of REINFORCE, token mean
    clip_low: float = 0.0  # the ratio is clipped from below at 1 - clip_low; 0: the loss's own, 0.2, but 3e-4 of "gspo"
    clip_high: float = 0.0  # the ratio is clipped from above at 1 + clip_high; 0: the loss's own, 0.2, but 0.28 of
    # "dapo", 4e-4 of "gspo", 4.0 of "cispo"
    truncated: str = (
        "count"  # those ended by max_new_tokens: "count" in the loss, or "mask": in their group's mean only
    )
    truncated_penalty: float = 0.0  # subtracted from their rewards before advantages; metrics leave it out
    importance_bound: float = 2.0  # largest weight p / p_behaviour of a token that older weights have drawn
    sequence_bound: float = 0.0  # samples of older weights whose product of ratios is beyond it count nothing; 0: all
    # count
    kl_coefficient: float = 0.0  # weight of the KL to the model at the start, of which a copy is kept unless
    # adapters are trained: then it is the base; 0: none
    scale_by_std: bool = True  # divide advantages by the group's standard deviation; must be false with "dr_grpo"
    lora: LoraSettings = field(default_factory=LoraSettings)

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "epochs_per_step", "microbatch_tokens")
        found += not_among(self, "low_precision", LOW_PRECISIONS) + not_among(self, "schedule", SCHEDULES)
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                found.append((name, f"must be at least 0 and less than 1, not {value}"))
        if not 0 <= self.final_share <= 1:
            found.append(("final_share", f"must be from 0 to 1, not {self.final_share}"))
        found += not_positive(self, "learning_rate", "max_grad_norm", "importance_bound")
        if self.sequence_bound and not self.sequence_bound > 1:
            found.append(("sequence_bound", f"must be 0 or more than 1, not {self.sequence_bound}"))
        found += not_among(self, "truncated", TRUNCATED) + self._loss_faults()
        return found + [(f"lora.{key}", why) for key, why in self.lora.faults()]

    def _loss_faults(self) -> list[Fault]:
        found = not_among(self, "loss", tuple(CLIP_BOUNDS))
        for name in ("clip_low", "clip_high", "truncated_penalty"):
            if (value := getattr(self, name)) < 0:
                found.append((name, f"must not be negative, not {value}"))
        if self.loss == "cispo" and self.clip_low:
            found.append(("clip_low", 'must be 0 with loss="cispo", which bounds its weights from above alone'))
        if self.loss == "dr_grpo" and self.scale_by_std:
            found.append(("scale_by_std", 'must be false with loss="dr_grpo", which divides advantages by nothing'))
        return found

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


@dataclass(frozen=True)
class ParallelSettings(Section):
    """The number of ranks that share one engine. All ranks of the job are divided into such replicas."""

    tp: int = 1  # number of ranks that share each layer
    pp: int = 1  # number of stages that the layers are divided into; a replica is tp x pp ranks

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a replica."""
        return self.tp * self.pp

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return too_small(self, "tp", "pp")


@dataclass(frozen=True)
class EngineSettings(Section):
    """The engine in each rank; see `lockstep.rollout.config.EngineConfig`."""

    device: str = ""  # "cpu" or "cuda"; empty: this rank's GPU if there is one
    kv_cache: str = "auto"  # size of the KV pool: "auto", bytes ("512MiB") or blocks ("4096 blocks")
    max_num_seqs: int = 256  # largest number of sequences that run at a time
    max_num_batched_tokens: int = 2048  # largest number of rows of one step of the engine
    invariant: bool = True  # a row's bits do not depend on the batch; false: logprob_gap may be above 0.0
    k_blocks: int = 1  # partial products of a row-parallel product, in the trainer too; equal k_blocks give equal bits
    # for any tp. Invariant mode needs a multiple of tp
    sequence_pipelining: bool = True  # a prompt's next chunk may enter a stage while the last one is in a later stage
    rank_timeout_s: int = 60  # silence of a rank of the replica after which a call fails, naming the rank
    speculation: str = "auto"  # rows for tokens that may come next, which changes no bit: "auto" or "off"

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "max_num_seqs", "max_num_batched_tokens", "k_blocks", "rank_timeout_s")
        if self.speculation not in ("auto", "off"):
            found.append(("speculation", f'must be "auto" or "off", not {self.speculation!r}'))
        return found


@dataclass(frozen=True)
class WeightSettings(Section):
    """The updates of the engines' weights."""

    bucket_bytes: str = "512MiB"  # largest size of a bucket; tensors are sent in buckets
    verify: bool = True  # compare the engines' digests with the trainer's before an update is committed
    undo: str = "tensors"  # "tensors": keep old tensors until the commit; "none": a failed update ends sampling
    timeout_s: int = 120  # longest wait of each part of an update
    folder: str = ""  # folder for the files of disk syncs; empty: the run's folder

    @property
    def num_bucket_bytes(self) -> int:
        """The value of `bucket_bytes` as a number."""
        return _num_bytes(self.bucket_bytes)

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "timeout_s") + not_among(self, "undo", UNDOS)
        try:
            _num_bytes(self.bucket_bytes)
        except ValueError as error:
            found.append(("bucket_bytes", str(error)))
        return found


@dataclass(frozen=True)
class HttpSettings(Section):
    """The HTTP surface on each replica."""

    port: int = 0  # port of rank 0, on loopback; rank r listens at this port + r, if its engine takes requests; 0: none

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return [] if 0 <= self.port < 65536 else [("port", f"must be from 0 to 65535, not {self.port}")]


def too_small(settings: object, *names: str) -> list[Fault]:
    """List the named settings that are less than 1."""
    values = {name: getattr(settings, name) for name in names}
    return [(name, f"must be at least 1, not {value}") for name, value in values.items() if value < 1]


def not_positive(settings: object, *names: str) -> list[Fault]:
    """List the named settings that are not more than 0."""
    values = {name: getattr(settings, name) for name in names}
    return [(name, f"must be positive, not {value}") for name, value in values.items() if not value > 0]


def not_among(settings: object, name: str, choices: Sequence[str]) -> list[Fault]:
    """List the setting if it is none of the choices."""
    value = getattr(settings, name)
    *first, last = (f'"{choice}"' for choice in choices)
    return [] if value in choices else [(name, f"must be {', '.join(first)} or {last}, not {value!r}")]


def _num_bytes(text: str) -> int:
    """Parse a number of bytes, written like the size of the KV pool. Raises ValueError, which does not name the key."""
    try:
        num_bytes = parse_kv_size(text).num_bytes
    except ValueError:
        num_bytes = None  # the error's message is about another setting
    if num_bytes is None:
        raise ValueError(f'must be bytes ("512MiB"), not {text!r}')
    return num_bytes
