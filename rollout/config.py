"""The settings of an engine: one frozen value, checked as a whole."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

POLICIES = ("edf", "fcfs", "lrs")
MAX_ROLLBACK = 256
JUMP_MODES = ("text", "exact", "off")
RECEIPTS = ("off", "tokens", "digests")
DRAFT_SOURCES = ("caller", "siblings", "history", "past")
MAX_DRAFT = 64  # tokens
DEADLINE_MULTIPLIER = 1.5
MIN_DEADLINE_S = 0.5
ADMISSION_RATIO = 0.7
PIN_BUDGET = 0.5

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_COUNTS = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size", "max_model_len"),
    *("tp", "pp", "k_blocks", "state_check_steps", "num_scheduler_steps"),
    *("jump_forward_max_rollback", "jump_forward_max_blocks", "max_grammars"),
    *("max_waiting_grammars", "grammar_memory_mb", "speculation_memory_mb"),
)
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(|k|m|g|ki|mi|gi)b\s*", re.IGNORECASE)
_BLOCKS = re.compile(r"\s*(\d+)\s*blocks?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class KVSize:
    """The configured size of the KV pool: exactly one of the two, or neither for `auto`."""

    num_bytes: int | None = None
    num_blocks: int | None = None


def _wrong_sources(speculation: object) -> list[str]:
    """Return what is wrong with the setting of that name."""
    if speculation in ("auto", "off"):
        return []
    if not isinstance(speculation, Mapping):
        return [f'speculation must be "auto", "off" or a table of sources with numbers of tokens, not {speculation!r}']
    wrong = []
    if unknown := sorted(str(name) for name in speculation if name not in DRAFT_SOURCES):
        wrong.append(f"speculation names {', '.join(unknown)}: its sources are {', '.join(DRAFT_SOURCES)}")
    for name, depth in speculation.items():
        if type(depth) is not int or not 1 <= depth <= MAX_DRAFT:
            wrong.append(f"speculation: {name} must be from 1 to {MAX_DRAFT} tokens, not {depth!r}")
    return wrong


def parse_kv_size(text: str | int) -> KVSize:
    """Read a KV pool size: `auto`, bytes (`"512MiB"`, `"2GB"`), or blocks (`"4096 blocks"`, or a plain number).

    Raises ValueError quoting text that it cannot read.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = KVSize(num_blocks=text)
    elif not isinstance(text, str):
        raise ValueError(f'kv_cache must be "auto", bytes ("512MiB") or blocks ("4096 blocks"), not {text!r}')
    elif text.strip().lower() == "auto":
        return KVSize()
    elif match := _BLOCKS.fullmatch(text):
        size = KVSize(num_blocks=int(match[1]))
    elif match := _BYTES.fullmatch(text):
        size = KVSize(num_bytes=int(float(match[1]) * _UNITS[match[2].lower()]))
    else:
        raise ValueError(f'kv_cache must be "auto", bytes ("512MiB") or blocks ("4096 blocks"), not {text!r}')
    if (size.num_bytes or size.num_blocks or 0) < 1:
        raise ValueError(f"kv_cache is {text!r}, but a pool needs at least one block")
    return size


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Example: `EngineConfig(kv_cache="512MiB", max_num_seqs=64)`."""

    dtype: str | None = None  # "float32" | "bfloat16"; None keeps the module's, or the folder's
    device: str | None = None  # "cpu", "cuda", "cuda:1"; None keeps the module's, or the first GPU if there is one
    kv_cache: str | int = "auto"  # size of the KV pool: "auto", bytes ("512MiB") or blocks ("4096 blocks")
    block_size: int = 16  # tokens per KV block
    max_num_seqs: int = 256  # sequences that may hold blocks at a time
    max_num_batched_tokens: int = 2048  # rows of one step, prefill and decode together
    chunked_prefill_size: int | None = None  # rows of one prompt per step; None: as many as fit in the step
    max_model_len: int | None = None  # prompt + output tokens of a sequence, at most the model's own limit;
    # None: that limit, or, for a model that tells none (without attention), 32,768
    prefix_cache: bool = True  # reuse the KV of equal prefixes
    state_snapshots: int | None = None  # recurrent states that are kept for prefix hits, if the model has recurrent
    # layers; None: as many as sequences may run; 0: none, and no prefix hits for such models
    pin_budget: float = PIN_BUDGET  # share of the pool's blocks that pins may protect from eviction
    invariant: bool = True  # bits do not depend on the batch, see docs/architecture.md; False is a speed choice
    policy: str = "fcfs"  # order of the waiting queue: "fcfs", "edf" (deadline), "lrs" (least relative slack)
    deadline_multiplier: float = DEADLINE_MULTIPLIER  # time from arrival to deadline, in predicted prefill times; at
    # least min_deadline_s. For edf and lrs
    min_deadline_s: float = MIN_DEADLINE_S  # shortest time from arrival to deadline. For edf and lrs
    admission_ratio: float = ADMISSION_RATIO  # share of the tokens that running sequences may still generate for which
    # admission keeps KV blocks free, at first; it adapts
    overlap: bool | None = None  # plan the next step and deliver the last one while the model runs; None: on a GPU, if
    # one rank has the whole model
    num_scheduler_steps: int = 8  # decode steps from one schedule, on a CPU, where nothing needs the host in between,
    # as stop strings, streams, grammars, adapters and drafts do. They end early for whatever waits. `Engine.step` runs
    # one if not told otherwise; 1: always one
    cuda_graph_batch_sizes: tuple[int, ...] | None = None  # decode batch sizes that are recorded; other batches are
    # padded to the next one. (): none; None: up to max_num_seqs, with drafts to 17 times as many, on a GPU 1, 2,
    # 4, 8, 16, 24 … 256, on a CPU 1 … 8, 10 … 16, 20 … 32, 40 … 128, 144 … 256
    jump_forward: str = "text"  # for requests with a grammar that name no mode: "text", "exact" or "off"
    jump_forward_max_rollback: int = 10  # tokens that a jump may replace ("text" only)
    jump_forward_max_blocks: int = 10  # KV blocks that one jump may take
    speculation: str | Mapping[str, int] = "auto"  # rows for tokens that may come next, which changes no bit: "auto",
    # "off", or the sources to ask, each with the most tokens of a draft: "past" (the sequence's own tokens), "siblings"
    # (samples of the same prompt), "history" (earlier samples of it), "caller" (`draft_token_ids`). Example:
    # {"siblings": 8, "past": 4}. How many rows a step has is chosen from what was measured
    speculation_memory_mb: int = 64  # MiB of ended samples that are kept for drafts
    grammar_any_whitespace: bool = False  # JSON with any spaces and line breaks; little text is forced then
    max_grammars: int = 256  # compiled grammars that are kept
    max_waiting_grammars: int = 64  # different grammars that an HTTP request may have; where so many wait to be
    # compiled, further ones are refused for the time being
    grammar_timeout_s: float = 20.0  # processor time that the compilation of one grammar may take
    grammar_memory_mb: int = 1024  # MiB that each of the two processes that compile grammars may take, and all compiled
    # grammars together; one of them at most a sixteenth
    trace: str | None = None  # file for Chrome-trace events
    receipts: str = "off"  # receipts of answers, for requests that do not say: "off", "tokens" (with tokens and
    # log-probabilities) or "digests" (with hashes of them), see docs/guides/receipts.md
    seed: int = 0  # root of the noise of requests without a sampling_seed
    tp: int = 1  # ranks that share each layer
    pp: int = 1  # stages that the layers are divided into; a replica is tp * pp ranks
    k_blocks: int = 1  # number of partial products that form a row-parallel product: equal k_blocks give equal bits for
    # any tp. Invariant mode needs a multiple of tp, and the trainer's forward the same number
    sequence_pipelining: bool = True  # a prompt's next chunk may enter a stage while the last one is in a later stage
    rank_timeout_s: float = 60.0  # silence of a rank of the replica after which a call fails, naming the rank
    state_check_steps: int = 64  # steps between comparisons of the ranks' states with the controller's

    def __post_init__(self) -> None:
        wrong = []
        for name in _COUNTS:
            value = getattr(self, name)
            optional = name in ("chunked_prefill_size", "max_model_len")
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                wrong.append(f"{name} must be a positive integer, not {value!r}")
        num = self.state_snapshots
        if num is not None and (isinstance(num, bool) or not isinstance(num, int) or num < 0):
            wrong.append(f"state_snapshots must be a number of snapshots, at least 0, not {num!r}")
        if self.overlap is not None and not isinstance(self.overlap, bool):
            wrong.append(f"overlap must be true or false, not {self.overlap!r}")
        for name in ("prefix_cache", "invariant", "sequence_pipelining", "grammar_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                wrong.append(f"{name} must be true or false, not {getattr(self, name)!r}")
        sizes = self.cuda_graph_batch_sizes
        if isinstance(sizes, list):  # from a file
            object.__setattr__(self, "cuda_graph_batch_sizes", sizes := tuple(sizes))
        is_tuple = isinstance(sizes, tuple)
        if sizes is not None and not (is_tuple and all(type(size) is int and size > 0 for size in sizes)):
            wrong.append(f"cuda_graph_batch_sizes must be a list of positive integers, not {sizes!r}")
        for name, known in (("jump_forward", JUMP_MODES), ("receipts", RECEIPTS), ("policy", POLICIES)):
            if (value := getattr(self, name)) not in known:
                wrong.append(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if isinstance(self.jump_forward_max_rollback, int) and self.jump_forward_max_rollback > MAX_ROLLBACK:
            wrong.append(f"jump_forward_max_rollback must be at most {MAX_ROLLBACK}")
        wrong += _wrong_sources(self.speculation)
        for name in ("deadline_multiplier", "min_deadline_s", "rank_timeout_s", "grammar_timeout_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                wrong.append(f"{name} must be a positive number, not {value!r}")
        for name in ("admission_ratio", "pin_budget"):
            ratio = getattr(self, name)
            if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
                wrong.append(f"{name} must be a number from 0 to 1, not {ratio!r}")
        if self.dtype not in (None, "float32", "bfloat16"):
            wrong.append(f'dtype must be "float32" or "bfloat16", not {self.dtype!r}')
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            wrong.append(f"seed must be an integer, not {self.seed!r}")
        try:
            parse_kv_size(self.kv_cache)
        except ValueError as error:
            wrong.append(str(error))
        if not wrong and self.invariant and self.k_blocks % self.tp:
            wrong.append(
                f"in invariant mode k_blocks ({self.k_blocks}) must be a multiple of tp ({self.tp}): set k_blocks to "
                f"{-(-self.k_blocks // self.tp) * self.tp} here and in the trainer, or invariant to false"
            )
        if not wrong and self.block_size % 16:
            wrong.append(f"block_size must be a multiple of 16, not {self.block_size}")
        if not wrong and self.max_num_batched_tokens < self.max_num_seqs:
            wrong.append(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or a full batch could not decode in one step"
            )
        if wrong:
            raise ValueError("; ".join(wrong))

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> EngineConfig:
        """Build from a mapping, as read from a file. Raises ValueError listing every unknown key."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values).difference(known)):
            raise ValueError(f"unknown engine setting: {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**values)  # type: ignore[arg-type]
