"""The warm start: supervised training of a small model on worked examples until it is a weak solver, with a cache in
Hugging Face format.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ....weight_sync.disk.atomic_folder import complete_folder, partial_folder
from ....weight_sync.disk.claims import remove_leftovers
from ...failures import files_of
from .arithmetic import CONTEXT_TOKENS, ArithmeticSpec, arithmetic_problems, build_tokenizer, worked_solution

FORMAT = 1  # part of the cache key: raise it when a code change gives another model for the same spec

MODEL_FAMILIES = ("qwen3", "qwen3_5")


@dataclass(frozen=True)
class ModelSpec:
    """The shape of the model to build. Every width is a multiple of 32, which invariant mode needs."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    family: str = "qwen3"  # or "qwen3_5": each fourth layer and the last have attention, the others a gated delta net

    def __post_init__(self) -> None:
        widths = {name: getattr(self, name) for name in ("hidden_size", "intermediate_size", "head_dim")}
        faults = [
            f"{name}={width} is not a positive multiple of 32"
            for name, width in widths.items()
            if width < 1 or width % 32
        ]
        if self.num_layers < 1:
            faults.append(f"num_layers={self.num_layers} is below 1")
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            faults.append(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.family not in MODEL_FAMILIES:
            faults.append(f"family must be one of {', '.join(MODEL_FAMILIES)}, not {self.family!r}")
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True)
class WarmStartSpec:
    """The settings of the warm start."""

    seed: int = 0  # of the weights; the examples use data.seed
    model: ModelSpec = field(default_factory=ModelSpec)
    data: ArithmeticSpec = field(default_factory=ArithmeticSpec)
    slip_rate: float = 0.75  # probability with which a worked example forgets a carry
    num_steps: int = 300
    batch_size: int = 128  # examples in a step, over all ranks
    learning_rate: float = 4e-3  # largest one: after `num_warmup_steps`, before a linear decay to a tenth
    num_warmup_steps: int = 20
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, not {getattr(self, name)}"
            for name in ("num_steps", "batch_size", "num_warmup_steps")
            if getattr(self, name) < 1
        ]
        if not 0 <= self.slip_rate <= 1:
            faults.append(f"slip_rate must be from 0 to 1, not {self.slip_rate}")
        if not self.learning_rate > 0:
            faults.append(f"learning_rate must be positive, not {self.learning_rate}")
        if not self.max_grad_norm > 0:
            faults.append(f"max_grad_norm must be positive, not {self.max_grad_norm}")
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True)
class WarmStartProgress:
    """The progress of a warm start after one step."""

    step: int  # finished steps
    num_steps: int
    loss: float  # token mean over all ranks, nats


def warm_start(
    spec: WarmStartSpec,
    cache_dir: str | Path,
    *,
    device: torch.device | str = "cpu",
    prepare: Callable[[PreTrainedModel], None] | None = None,
    prepared_as: str = "",
    on_progress: Callable[[WarmStartProgress], None] | None = None,
) -> Path:
    """Return the folder of the warm-started model and tokenizer. Trains the model if `cache_dir` does not have it.

    Call it on every rank when torch.distributed is initialised: each rank takes its slice of every batch, rank 0 writes
    the folder, and all ranks return when it is complete. `prepare` may replace operations of the module before the
    training; `prepared_as` is then a name for them, part of the cache key, because they change the bits of the result.
    `on_progress` is called on every rank after every step. The random number generators keep their state.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    device = torch.device(device)
    key = warm_start_key(spec, num_ranks, device.type, prepared_as)
    folder = Path(cache_dir) / f"warm-start-{key}"
    remove_leftovers(folder.parent)
    if _rank_zero_finds(folder, device):
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        tokenizer = build_tokenizer()
        model = build_model(spec.model, tokenizer)
        model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides that it is a method
    if prepare is not None:
        prepare(model)
    train_supervised(model, tokenizer, spec, on_progress)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _save(model, tokenizer, spec, folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


def warm_start_key(spec: WarmStartSpec, num_ranks: int, device_type: str, prepared_as: str) -> str:
    """Hash all values that determine the result's bits on one processor. Returns 16 hexadecimal digits."""
    determinants = {
        "format": FORMAT,
        "spec": asdict(spec),
        "num_ranks": num_ranks,
        "device_type": device_type,
        "prepared_as": prepared_as,
        "versions": [torch.__version__, transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(determinants, sort_keys=True).encode()).hexdigest()[:16]


def build_model(spec: ModelSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a Qwen3 or Qwen3.5 model in float32 and eval mode, with weights from torch's default generator."""
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
        "initializer_range": spec.hidden_size**-0.5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if spec.family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common)).eval()
    last = spec.num_layers - 1
    kinds = ["full_attention" if i % 4 == 3 or i == last else "linear_attention" for i in range(spec.num_layers)]
    linear: dict[str, Any] = {"linear_num_key_heads": spec.num_kv_heads, "linear_num_value_heads": spec.num_heads,
              "linear_key_head_dim": spec.head_dim, "linear_value_head_dim": spec.head_dim}  # fmt: skip
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, **linear, layer_types=kinds)).eval()


def train_supervised(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    spec: WarmStartSpec,
    on_progress: Callable[[WarmStartProgress], None] | None = None,
) -> None:
    """Train `model` in place on worked solutions of training problems, and set it to eval mode.

    The loss is the mean over completion tokens, end token included, of the whole batch over all ranks.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = next(model.parameters()).device
    data = arithmetic_problems(spec.data)
    wrapped = DistributedDataParallel(model) if num_ranks > 1 else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay
    )
    model.train()
    for step in range(spec.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * _schedule(step, spec)
        # Negative numbers, so that these examples differ from the problems of the job's own steps.
        problems = data.train_problems(-1 - step, spec.batch_size)
        rng = random.Random(f"slips/{spec.data.seed}/{step}")
        examples = [(problem.prompt, worked_solution(problem, spec.slip_rate, rng)) for problem in problems]
        num_tokens = sum(len(tokenizer(text, add_special_tokens=False).input_ids) + 1 for _, text in examples)
        batch = _encode(tokenizer, examples[rank::num_ranks], device)
        logits = wrapped(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        loss = loss / num_tokens
        optimizer.zero_grad(set_to_none=True)
        (loss * num_ranks).backward()  # DDP averages over ranks, and the loss is their sum
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.max_grad_norm)
        optimizer.step()
        total = loss.detach()
        if num_ranks > 1:  # on every rank, also without `on_progress`, because the other ranks wait for it
            dist.all_reduce(total)
        if on_progress is not None:
            on_progress(WarmStartProgress(step=step + 1, num_steps=spec.num_steps, loss=total.item()))
    optimizer.zero_grad(set_to_none=True)
    model.eval()


@dataclass(frozen=True)
class _Batch:
    input_ids: Tensor  # [examples, tokens], padded on the right
    attention_mask: Tensor  # same shape, 1 for real tokens
    labels: Tensor  # same shape, -100 where the loss ignores the token


def _encode(tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, str]], device: torch.device) -> _Batch:
    prompts = [tokenizer(prompt).input_ids for prompt, _ in examples]
    completions = [
        [*tokenizer(completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for _, completion in examples
    ]
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    shape = (len(examples), width)
    input_ids = torch.full(shape, tokenizer.pad_token_id)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, -100)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor(prompt + completion)
        attention_mask[row, :end] = 1
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return _Batch(input_ids.to(device), attention_mask.to(device), labels.to(device))


def _schedule(step: int, spec: WarmStartSpec) -> float:
    """Return the factor of the learning rate: a linear rise to 1, then a linear fall to a tenth."""
    if step < spec.num_warmup_steps:
        return (step + 1) / spec.num_warmup_steps
    num_decay_steps = max(spec.num_steps - spec.num_warmup_steps, 1)
    return 1.0 - 0.9 * (step - spec.num_warmup_steps) / num_decay_steps


def _rank_zero_finds(folder: Path, device: torch.device) -> bool:
    """Return, on every rank, whether rank 0 sees the folder, so that all ranks take the same branch."""
    if not dist.is_initialized():
        return folder.is_dir()
    found = torch.tensor([folder.is_dir()], dtype=torch.uint8, device=device)
    dist.broadcast(found, src=0)
    return bool(found.item())


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, spec: WarmStartSpec, folder: Path) -> None:
    """Write the folder under another name and rename it, so that a folder of this name is always complete. Raises
    FileFailed."""
    with files_of(folder), partial_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "warm_start.json").write_text(json.dumps(asdict(spec), indent=2) + "\n")
        complete_folder(partial)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another job with the same spec has written the folder; its result is the same.
