"""The other sections of the job's settings. Each checks the ranges of its own values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .section import Fault, Section, bytes_of, faults_by_name, negative, not_among, not_positive, too_small

DTYPES = ("float32", "bfloat16")
_LONGEST_S = 10**9  # longer than that no timer waits
_LONGEST_NAME = 240  # bytes: file systems have 255, and files beside the folder have longer names
UNDOS = ("tensors", "none")


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
    wandb: str = ""  # project in Weights & Biases to which the metrics go, too; empty: none
    replay_schedule: str = ""  # schedule.jsonl of a run with rollout.on_commit "keep" or "drop": each token is drawn
    # under the commit that drew it there, so that the digests are those of that run
    timeout_s: int = 120  # longest time that a rank waits in a collective for one that does not come and whose own work
    # (samples, files) does not go on; on CPUs without the time in which it was stopped
    rollouts_every: int = 1  # steps between those whose samples are kept in the folder `rollouts`; 0: none are
    rollouts_keep: int = 200  # number of newest steps whose samples are kept; 0: all

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "num_steps", "eval_every", "checkpoint_every", "timeout_s")
        found += negative(self, "num_ranks", "rollouts_every", "rollouts_keep")
        if self.timeout_s > _LONGEST_S:
            found.append(("timeout_s", f"must be at most {_LONGEST_S}, not {self.timeout_s}"))
        if self.name in ("", ".", "..") or "/" in self.name:
            found.append(("name", f"must be a folder name, not {self.name!r}"))
        if (length := len(self.name.encode(errors="replace"))) > _LONGEST_NAME:
            found.append(("name", f"must have at most {_LONGEST_NAME} bytes, not {length}"))
        return found


@dataclass(frozen=True)
class ModelSettings(Section):
    """The model: a folder in Hugging Face format, or, without a path, a small one that is built and warm-started."""

    path: str = ""  # a Hugging Face folder; empty: a small model is built with the sizes below
    family: str = "qwen3"  # of the built model: "qwen3" or "qwen3_5" (gated delta nets in most layers)
    dtype: str = "float32"  # type of the parameters: "float32" or "bfloat16"
    hidden_size: int = 128  # width of the built model, a multiple of 32
    intermediate_size: int = 256  # width of the built model's MLP, a multiple of 32
    num_layers: int = 4  # layers of the built model
    num_heads: int = 4  # query heads of the built model, a multiple of num_kv_heads
    num_kv_heads: int = 2  # key and value heads of the built model
    head_dim: int = 32  # size of each head of the built model, a multiple of 32

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        return (
            too_small(self, *sizes) + not_among(self, "dtype", DTYPES) + not_among(self, "family", ("qwen3", "qwen3_5"))
        )


@dataclass(frozen=True)
class WarmStartSettings(Section):
    """Supervised steps on worked examples that make the built model a weak solver. The result is cached."""

    enabled: bool | None = None  # warm-start the built model; where it is not set: true without model.path
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
class SourceSettings(Section):
    """A file of problems among several."""

    path: str  # JSONL or Parquet file
    weight: float = 1.0  # its share of the prompts, in proportion to the weights of the others
    prompt_field: str = ""  # field of a row that has the prompt; empty: data.prompt_field
    answer_field: str = ""  # field of a row that has the answer; empty: data.answer_field

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return ([] if self.path else [("path", "must name a file")]) + not_positive(self, "weight")


@dataclass(frozen=True)
class DataSettings(Section):
    """The problems: generated sums of three-digit numbers, or, with a path, one problem per row of a JSONL or Parquet
    file, or a dataset of the package reasoning-gym."""

    path: str = ""  # JSONL file, one problem a line, or Parquet file (.parquet); empty: generated sums
    heldout_path: str = ""  # file of held-out problems, likewise; empty: every tenth problem of `path` is held out
    sources: dict[str, SourceSettings] = field(default_factory=dict)  # several files in place of `path`, by name
    prompt_field: str = "prompt"  # field of a row that has the prompt; dots lead into nested fields, as in
    # "reward_model.ground_truth", where no field has the whole name
    answer_field: str = "answer"  # field of a row that has the answer; empty: rows have none, the reward reads the row
    images_field: str = ""  # field of a row that lists files of pictures, relative to the file; empty: none. Messages
    # may name theirs themselves, in parts of the type "image"
    reasoning_gym: str = ""  # a dataset of the package reasoning-gym, such as "chain_sum"; empty: none. The ready
    # reward reasoning_gym scores it
    reasoning_gym_options: dict[str, object] = field(default_factory=dict)  # fields of the dataset's config, and size:
    # number of problems, of which every tenth is held out; seed is run.seed where it is not set
    min_digits: int = 3  # least number of digits of each number to add, at least 2
    max_digits: int = 3  # largest number of digits of each number to add, at most 9
    num_heldout: int = 512  # largest number of held-out problems; of several sources in proportion to their weights
    chat: bool = False  # a prompt that is text becomes a user's message; prompts that are messages do so in any case
    system_prompt: str = ""  # system message before the messages of each prompt; needs chat, or messages
    few_shot_path: str = ""  # file of rows that are shown, with their answers, before each prompt
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)  # variables of the model's chat template
    too_long: str = "refuse"  # rows whose prompt leaves no room for rollout.max_new_tokens in the context: "refuse"
    # names them and starts nothing, "drop" leaves them out. With an environment prompts are not looked at

    @property
    def has_rows(self) -> bool:
        """Whether problems are rows, of files or of a dataset, and not generated sums."""
        return bool(self.path or self.reasoning_gym or self.sources)

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "num_heldout") + not_among(self, "too_long", ("refuse", "drop"))
        found += faults_by_name(self.sources, "sources")
        names = ("chat", "system_prompt", "few_shot_path", "chat_template_kwargs")
        if not self.has_rows:
            why = "needs data.path, data.sources or data.reasoning_gym"
            found += [(name, why) for name in names if getattr(self, name)]
        if self.heldout_path and not (self.path or self.sources):
            found.append(("heldout_path", "needs data.path or data.sources"))
        if self.sources and (self.path or self.reasoning_gym):
            other = "path" if self.path else "reasoning_gym"
            found.append(("sources", f"must not be set with data.{other}: they are all the problems"))
        if self.path and self.reasoning_gym:
            found.append(("reasoning_gym", "must not be set with data.path: the problems are those of a file"))
        if self.reasoning_gym_options and not self.reasoning_gym:
            found.append(("reasoning_gym_options", "needs data.reasoning_gym"))
        return found


@dataclass(frozen=True)
class CheckpointSettings(Section):
    """The files of a run's weights that stay. `run.checkpoint_every` says how often a checkpoint is written."""

    keep: int = 2  # number of newest checkpoints that stay; 0: all
    best: bool = False  # also keep the model of the evaluation with the largest mean reward, in the folder `best`
    best_by: str = ""  # name of the evaluation, of the table `evaluations`, that decides; empty: the held-out one

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        return [("keep", f"must not be negative, not {self.keep}")] if self.keep < 0 else []


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
        if not re.fullmatch(r"|cpu|cuda(:\d+)?", self.device):
            found.append(("device", f'must be "cpu", "cuda" or "cuda:1", say, not {self.device!r}'))
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
        return bytes_of(self.bucket_bytes)

    def faults(self) -> list[Fault]:
        """See `Section.faults`."""
        found = too_small(self, "timeout_s") + not_among(self, "undo", UNDOS)
        try:
            bytes_of(self.bucket_bytes)
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
