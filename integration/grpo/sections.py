"""The sections of the job's settings. Each knows which of its own values are out of range."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ...rollout.config import parse_kv_size

DTYPES = ("float32", "bfloat16")
UNDOS = ("tensors", "none")
MAX_ZERO_STAGE = 3

Fault = tuple[str, str]  # a key, and why its value is refused


class Section(ABC):
    """One table of the job's TOML."""

    @abstractmethod
    def faults(self) -> list[Fault]:
        """List every value that is out of range, by its key in this section."""


@dataclass(frozen=True)
class RunSettings(Section):
    """What is run, and where it is written."""

    name: str  # results go to the folder of this name in run.dir
    dir: str = "runs"  # where results go
    seed: int = 0  # root of every random choice
    num_ranks: int = 0  # how many ranks the config is made for; 0: any number
    num_steps: int = 80  # GRPO steps
    eval_every: int = 10  # steps between held-out evaluations; the first and the last step always have one
    checkpoint_every: int = 20  # steps between checkpoints
    tensorboard: bool = False  # write TensorBoard events too
    timeout_s: int = 120  # how long a rank waits for the others in a collective

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "num_steps", "eval_every", "checkpoint_every", "timeout_s")
        if self.num_ranks < 0:
            found.append(("num_ranks", f"must not be negative, not {self.num_ranks}"))
        if not self.name or "/" in self.name:
            found.append(("name", f"must be a folder name, not {self.name!r}"))
        return found


@dataclass(frozen=True)
class ModelSettings(Section):
    """The model: a folder in Hugging Face format, or, without a path, a small Qwen3 that is built and warm-started."""

    path: str = ""  # a Hugging Face folder; empty: a small Qwen3 is built in the shape below
    dtype: str = "float32"  # or "bfloat16"
    hidden_size: int = 128  # of the built model, as are the next five
    intermediate_size: int = 256  # width of its MLP
    num_layers: int = 4  # its layers
    num_heads: int = 4  # query heads
    num_kv_heads: int = 2  # key and value heads
    head_dim: int = 32  # size of a head

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        return too_small(self, *sizes) + not_among(self, "dtype", DTYPES)


@dataclass(frozen=True)
class WarmStartSettings(Section):
    """Supervised steps on worked examples that make the built model a weak solver; cached."""

    enabled: bool = True  # whether the built model is warm-started
    cache_dir: str = ".cache/lockstep"  # where the warm-started model is kept
    num_steps: int = 300  # supervised steps
    batch_size: int = 128  # examples, over all ranks
    learning_rate: float = 4e-3  # at its peak
    slip_rate: float = 0.75  # how often the worked examples forget a carry

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "num_steps", "batch_size") + not_positive(self, "learning_rate")
        if not 0 <= self.slip_rate <= 1:
            found.append(("slip_rate", f"must be from 0 to 1, not {self.slip_rate}"))
        return found


@dataclass(frozen=True)
class DataSettings(Section):
    """The problems: three-digit sums made on the spot, or, with a path, one problem per line of a JSONL file."""

    path: str = ""  # JSONL, one problem a line; empty: sums made on the spot
    heldout_path: str = ""  # JSONL too; without it every tenth problem of `path` is held out
    prompt_field: str = "prompt"  # where a line has its prompt
    answer_field: str = "answer"  # where a line has its answer
    min_digits: int = 3  # of each number to add
    max_digits: int = 3  # likewise
    num_heldout: int = 512  # problems held out, at most

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "num_heldout")
        if self.heldout_path and not self.path:
            found.append(("heldout_path", "needs data.path"))
        return found


@dataclass(frozen=True)
class RolloutSettings(Section):
    """How a step samples."""

    prompts_per_step: int = 32  # over all ranks
    group_size: int = 16  # samples of one prompt
    max_new_tokens: int = 16  # of each sample
    temperature: float = 1.0  # of sampling, and of both log-probabilities
    shuffle_rewards: bool = False  # a control: rewards are dealt out at random among the samples of a step

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "prompts_per_step", "group_size", "max_new_tokens") + not_positive(self, "temperature")
        if self.group_size < 2:
            found.append(("group_size", "must be at least 2: advantages compare the samples of a group"))
        return found


@dataclass(frozen=True)
class TrainSettings(Section):
    """How a step learns."""

    learning_rate: float = 5e-5  # of AdamW
    weight_decay: float = 0.0  # likewise
    num_warmup_steps: int = 10  # steps over which the learning rate rises
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    epochs_per_step: int = 1  # optimizer steps on each batch of samples
    microbatch_tokens: int = 16384  # rows of one forward and backward
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high
    kl_coefficient: float = 0.0  # weight of the KL to the model at the start; 0: no reference is kept
    scale_by_std: bool = True  # divide advantages by the group's standard deviation

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return too_small(self, "epochs_per_step", "microbatch_tokens") + not_positive(
            self, "learning_rate", "max_grad_norm"
        )


@dataclass(frozen=True)
class DeepSpeedSettings(Section):
    """What `trainer = "deepspeed"` shards."""

    zero_stage: int = 2  # 0: nothing, 1: optimizer state, 2: and gradients, 3: and parameters

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        if 0 <= self.zero_stage <= MAX_ZERO_STAGE:
            return []
        return [("zero_stage", f"must be from 0 to {MAX_ZERO_STAGE}, not {self.zero_stage}")]


@dataclass(frozen=True)
class ParallelSettings(Section):
    """How many ranks share one engine; all the ranks of the job are divided into such replicas."""

    tp: int = 1  # ranks that share each layer
    pp: int = 1  # stages that the layers are divided into; a replica is tp x pp ranks

    @property
    def num_ranks(self) -> int:
        """Of a replica."""
        return self.tp * self.pp

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return too_small(self, "tp", "pp")


@dataclass(frozen=True)
class EngineSettings(Section):
    """The engine in each rank; see `lockstep.rollout.config.EngineConfig`."""

    device: str = ""  # "cpu" or "cuda"; empty: this rank's GPU if there is one
    kv_cache: str = "auto"  # size of the KV pool: "auto", bytes ("512MiB") or blocks ("4096 blocks")
    max_num_seqs: int = 256  # sequences that run at a time
    max_num_batched_tokens: int = 2048  # rows of one step
    invariant: bool = True  # bits do not depend on the batch; false promises no logprob_gap of 0.0
    k_blocks: int = 1  # the trainer's too: runs with equal k_blocks have equal bits, whatever tp. A multiple of tp
    sequence_pipelining: bool = True  # chunks of one prompt may follow each other through the stages
    rank_timeout_s: int = 60  # how long a replica's rank may be silent before the others give up and name it

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return too_small(self, "max_num_seqs", "max_num_batched_tokens", "k_blocks", "rank_timeout_s")


@dataclass(frozen=True)
class WeightSettings(Section):
    """How an update of the engines' weights goes."""

    bucket_bytes: str = "512MiB"  # tensors travel in buckets of at most this size
    verify: bool = True  # compare the engines' digests with the trainer's before an update counts
    undo: str = "tensors"  # keep what an update overwrites until it counts; "none": a failed one disables the engine
    timeout_s: int = 120  # how long any part of an update may wait
    folder: str = ""  # where disk syncs put their folders; empty: the run's folder

    @property
    def num_bucket_bytes(self) -> int:
        """`bucket_bytes` as a number."""
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

    port: int = 0  # of rank 0; rank r, if its engine takes requests, listens at this port + r, on loopback; 0: none

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return [] if 0 <= self.port < 65536 else [("port", f"must be from 0 to 65535, not {self.port}")]


def too_small(settings: object, *names: str) -> list[Fault]:
    """List the settings that are less than 1."""
    values = {name: getattr(settings, name) for name in names}
    return [(name, f"must be at least 1, not {value}") for name, value in values.items() if value < 1]


def not_positive(settings: object, *names: str) -> list[Fault]:
    """List the settings that are not more than 0."""
    values = {name: getattr(settings, name) for name in names}
    return [(name, f"must be positive, not {value}") for name, value in values.items() if not value > 0]


def not_among(settings: object, name: str, choices: Sequence[str]) -> list[Fault]:
    """List the setting if it is none of the choices."""
    value = getattr(settings, name)
    *first, last = (f'"{choice}"' for choice in choices)
    return [] if value in choices else [(name, f"must be {', '.join(first)} or {last}, not {value!r}")]


def _num_bytes(text: str) -> int:
    """Bytes written as the KV pool's are. Raises ValueError without the key for what is none."""
    try:
        num_bytes = parse_kv_size(text).num_bytes
    except ValueError:
        num_bytes = None  # its message speaks of another setting
    if num_bytes is None:
        raise ValueError(f'must be bytes ("512MiB"), not {text!r}')
    return num_bytes
