"""The job's settings: TOML plus `key=value`, every fault named by its key before anything heavy is imported."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ...rollout.config import parse_kv_size

TRAINERS = ("ddp", "fsdp2", "deepspeed")
SYNCS = ("in_place", "distributed", "tensor", "disk", "delta")
ENGINES = ("local", "separate")
UNDOS = ("tensors", "none")
MAX_ZERO_STAGE = 3


@dataclass(frozen=True)
class RunSettings:
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


@dataclass(frozen=True)
class ModelSettings:
    """The model: a folder in Hugging Face format, or, without a path, a small Qwen3 that is built and warm-started."""

    path: str = ""  # a Hugging Face folder; empty: a small Qwen3 is built in the shape below
    dtype: str = "float32"  # or "bfloat16"
    hidden_size: int = 128  # of the built model, as are the next five
    intermediate_size: int = 256  # width of its MLP
    num_layers: int = 4  # its layers
    num_heads: int = 4  # query heads
    num_kv_heads: int = 2  # key and value heads
    head_dim: int = 32  # size of a head


@dataclass(frozen=True)
class WarmStartSettings:
    """Supervised steps on worked examples that make the built model a weak solver; cached."""

    enabled: bool = True  # whether the built model is warm-started
    cache_dir: str = ".cache/lockstep"  # where the warm-started model is kept
    num_steps: int = 300  # supervised steps
    batch_size: int = 128  # examples, over all ranks
    learning_rate: float = 4e-3  # at its peak
    slip_rate: float = 0.75  # how often the worked examples forget a carry


@dataclass(frozen=True)
class DataSettings:
    """The problems: three-digit sums made on the spot, or, with a path, one problem per line of a JSONL file."""

    path: str = ""  # JSONL, one problem a line; empty: sums made on the spot
    heldout_path: str = ""  # JSONL too; without it every tenth problem of `path` is held out
    prompt_field: str = "prompt"  # where a line has its prompt
    answer_field: str = "answer"  # where a line has its answer
    min_digits: int = 3  # of each number to add
    max_digits: int = 3  # likewise
    num_heldout: int = 512  # problems held out, at most


@dataclass(frozen=True)
class RolloutSettings:
    """How a step samples."""

    prompts_per_step: int = 32  # over all ranks
    group_size: int = 16  # samples of one prompt
    max_new_tokens: int = 16  # of each sample
    temperature: float = 1.0  # of sampling, and of both log-probabilities
    shuffle_rewards: bool = False  # a control: rewards are dealt out at random among the samples of a step


@dataclass(frozen=True)
class TrainSettings:
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


@dataclass(frozen=True)
class DeepSpeedSettings:
    """What `trainer = "deepspeed"` shards."""

    zero_stage: int = 2  # 0: nothing, 1: optimizer state, 2: and gradients, 3: and parameters


@dataclass(frozen=True)
class ParallelSettings:
    """How many ranks share one engine; all the ranks of the job are divided into such replicas."""

    tp: int = 1  # ranks that share each layer
    pp: int = 1  # stages that the layers are divided into; a replica is tp x pp ranks

    @property
    def num_ranks(self) -> int:
        """Of a replica."""
        return self.tp * self.pp


@dataclass(frozen=True)
class EngineSettings:
    """The engine in each rank; see `lockstep.rollout.config.EngineConfig`."""

    device: str = ""  # "cpu" or "cuda"; empty: this rank's GPU if there is one
    kv_cache: str = "auto"  # size of the KV pool: "auto", bytes ("512MiB") or blocks ("4096 blocks")
    max_num_seqs: int = 256  # sequences that run at a time
    max_num_batched_tokens: int = 2048  # rows of one step
    invariant: bool = True  # bits do not depend on the batch; false promises no logprob_gap of 0.0
    k_blocks: int = 1  # the trainer's too: runs with equal k_blocks have equal bits, whatever tp. A multiple of tp
    sequence_pipelining: bool = True  # chunks of one prompt may follow each other through the stages
    rank_timeout_s: int = 60  # how long a replica's rank may be silent before the others give up and name it


@dataclass(frozen=True)
class WeightSettings:
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


@dataclass(frozen=True)
class HttpSettings:
    """The HTTP surface on each replica."""

    port: int = 0  # of rank 0; rank r, if its engine takes requests, listens at this port + r, on loopback; 0: none


@dataclass(frozen=True)
class JobConfig:
    """All settings of one training job."""

    run: RunSettings
    model: ModelSettings = field(default_factory=ModelSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    data: DataSettings = field(default_factory=DataSettings)
    reward: str = "lockstep.integration.grpo.rewards:exact_answer"  # module:function
    trainer: str = "ddp"  # or "fsdp2", or "deepspeed"
    sync: str = "in_place"  # how engines get the weights: or "distributed", "tensor", "disk", "delta"
    engines: str = "local"  # in the trainer's ranks; or "separate": in processes of their own
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    deepspeed: DeepSpeedSettings = field(default_factory=DeepSpeedSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    weights: WeightSettings = field(default_factory=WeightSettings)
    http: HttpSettings = field(default_factory=HttpSettings)

    def __post_init__(self) -> None:
        wrong = [f"{key} {why}" for key, why in _faults(self)]
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def folder(self) -> Path:
        return Path(self.run.dir) / self.run.name


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a TOML file and apply `section.key=value` overrides in order.

    Values of overrides are read as TOML, and as plain text where they are not. Raises ValueError naming every unknown
    key, missing key and wrong type at once.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config {str(path)!r} is not TOML: {error}") from error
    for override in overrides:
        _apply_override(values, override)
    faults: list[str] = []
    config = _build(JobConfig, values, "", faults)
    if faults:
        raise ValueError("; ".join(faults))
    return config


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"override {override!r} is not of the form key=value")
    *sections, name = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{key}: {section} is a value, not a section")
    try:
        values[name] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[name] = text


def _build(cls: type, values: object, prefix: str, faults: list[str]) -> Any:
    """An instance of a settings class from a mapping; faults are added to the list, and the result is None then."""
    if not isinstance(values, Mapping):
        faults.append(f"{prefix.rstrip('.')} must be a section, not {values!r}")
        return None
    known = {f.name: f for f in fields(cls)}
    types = get_type_hints(cls)
    before = len(faults)
    faults += [f"unknown key {prefix}{name}" for name in values if name not in known]
    chosen = {}
    for name, spec in known.items():
        if name not in values:
            # A section without its own table still has required keys to report.
            if spec.default is MISSING and spec.default_factory is MISSING:
                if is_dataclass(types[name]):
                    _build(types[name], {}, f"{prefix}{name}.", faults)
                else:
                    faults.append(f"missing key {prefix}{name}")
        elif is_dataclass(types[name]):
            chosen[name] = _build(types[name], values[name], f"{prefix}{name}.", faults)
        else:
            chosen[name] = _typed(values[name], types[name], f"{prefix}{name}", faults)
    if len(faults) > before:
        return None
    try:
        return cls(**chosen)
    except ValueError as error:
        faults.append(str(error))
        return None


def _typed(value: object, wanted: type, key: str, faults: list[str]) -> object:
    """The value in the wanted type; an integer will do for a float."""
    allowed = get_args(wanted) or (wanted,)
    is_bool = isinstance(value, bool)
    if float in allowed and isinstance(value, int) and not is_bool:
        return float(value)
    if (is_bool and bool not in allowed) or not isinstance(value, allowed):
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        faults.append(f"{key} must be {names[allowed[0]]}, not {value!r}")
    return value


def _faults(config: JobConfig) -> list[tuple[str, str]]:
    """What is out of range, as (key, why)."""
    at_least_one = {
        "run": ("num_steps", "eval_every", "checkpoint_every", "timeout_s"),
        "model": ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
        "warm_start": ("num_steps", "batch_size"),
        "data": ("num_heldout",),
        "rollout": ("prompts_per_step", "group_size", "max_new_tokens"),
        "train": ("epochs_per_step", "microbatch_tokens"),
        "parallel": ("tp", "pp"),
        "engine": ("max_num_seqs", "max_num_batched_tokens", "k_blocks", "rank_timeout_s"),
        "weights": ("timeout_s",),
    }
    found = [
        (f"{section}.{name}", f"must be at least 1, not {value}")
        for section, names in at_least_one.items()
        for name in names
        if (value := getattr(getattr(config, section), name)) < 1
    ]
    positive = {
        "rollout.temperature": config.rollout.temperature,
        "train.learning_rate": config.train.learning_rate,
        "train.max_grad_norm": config.train.max_grad_norm,
        "warm_start.learning_rate": config.warm_start.learning_rate,
    }
    found += [(key, f"must be positive, not {value}") for key, value in positive.items() if not value > 0]
    if config.rollout.group_size < 2:
        found.append(("rollout.group_size", "must be at least 2: advantages compare the samples of a group"))
    choices = {
        "model.dtype": (config.model.dtype, ("float32", "bfloat16")),
        "trainer": (config.trainer, TRAINERS),
        "sync": (config.sync, SYNCS),
        "engines": (config.engines, ENGINES),
        "weights.undo": (config.weights.undo, UNDOS),
    }
    found += [(key, f"must be {_listed(known)}, not {value!r}") for key, (value, known) in choices.items()
              if value not in known]  # fmt: skip
    if config.engines == "separate" and config.sync == "in_place":
        found.append(("sync", 'must not be "in_place" with engines="separate": their weights have to travel'))
    if config.parallel.num_ranks > 1 and config.sync != "in_place":
        why = "with parallel.tp or parallel.pp each rank takes its part of what the trainer has in the same ranks"
        found.append(("sync", f'must be "in_place", not {config.sync!r}: {why}'))
    tp, k_blocks = config.parallel.tp, config.engine.k_blocks
    if config.engine.invariant and tp > 0 and k_blocks % tp:
        found.append(("engine.k_blocks", f"must be a multiple of parallel.tp={tp} in invariant mode, not {k_blocks}"))
    if not 0 <= config.deepspeed.zero_stage <= MAX_ZERO_STAGE:
        found.append(("deepspeed.zero_stage", f"must be from 0 to {MAX_ZERO_STAGE}, not {config.deepspeed.zero_stage}"))
    try:
        _num_bytes(config.weights.bucket_bytes)
    except ValueError as error:
        found.append(("weights.bucket_bytes", str(error)))
    if not 0 <= config.warm_start.slip_rate <= 1:
        found.append(("warm_start.slip_rate", f"must be from 0 to 1, not {config.warm_start.slip_rate}"))
    if config.run.num_ranks < 0:
        found.append(("run.num_ranks", f"must not be negative, not {config.run.num_ranks}"))
    if not config.run.name or "/" in config.run.name:
        found.append(("run.name", f"must be a folder name, not {config.run.name!r}"))
    if config.data.heldout_path and not config.data.path:
        found.append(("data.heldout_path", "needs data.path"))
    if config.model.path and config.warm_start.enabled:
        found.append(("warm_start.enabled", "must be false with model.path: only the built model is warm-started"))
    if not 0 <= config.http.port < 65536:
        found.append(("http.port", f"must be from 0 to 65535, not {config.http.port}"))
    if config.http.port and config.engines == "separate":
        found.append(("http.port", 'must be 0 with engines="separate": they are not in the ranks'))
    return found


def _listed(choices: Sequence[str]) -> str:
    *first, last = (f'"{choice}"' for choice in choices)
    return f"{', '.join(first)} or {last}"


def _num_bytes(text: str) -> int:
    """Bytes written as the KV pool's are. Raises ValueError without the key for what is none."""
    try:
        num_bytes = parse_kv_size(text).num_bytes
    except ValueError:
        num_bytes = None  # its message speaks of another setting
    if num_bytes is None:
        raise ValueError(f'must be bytes ("512MiB"), not {text!r}')
    return num_bytes
