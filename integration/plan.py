"""What a job will do, before it does it: ranks, batch, memory per rank."""

from __future__ import annotations

import importlib.util
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..rollout.config import EngineConfig
from .arithmetic import CONTEXT_TOKENS, build_tokenizer
from .job_config import JobConfig
from .rewards import load_reward
from .task import build_task, check_lengths
from .warm_start import ModelSpec, build_model


def model_spec(config: JobConfig) -> ModelSpec:
    """The shape of the model that is built."""
    m = config.model
    return ModelSpec(m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim)


def engine_config(config: JobConfig) -> EngineConfig:
    """How each rank's engine is set up. Raises ValueError naming what is out of range."""
    settings = config.engine
    return EngineConfig(
        kv_cache=settings.kv_cache,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        invariant=settings.invariant,
        seed=config.run.seed,
    )


def check_job(config: JobConfig, num_ranks: int) -> None:
    """Look at everything that can be wrong before a process group exists. Raises ValueError in one line."""
    wrong = []
    if config.run.num_ranks and config.run.num_ranks != num_ranks:
        wrong.append(f"run.num_ranks is {config.run.num_ranks}, but torchrun started {num_ranks}")
    if config.rollout.prompts_per_step % num_ranks:
        wrong.append(f"rollout.prompts_per_step={config.rollout.prompts_per_step} does not divide by {num_ranks} ranks")
    needed = ["matplotlib"] + ["tensorboard"] * config.run.tensorboard
    if absent := [name for name in needed if importlib.util.find_spec(name) is None]:
        wrong.append(f"{' and '.join(absent)} must be installed for plots and logs: pip install lockstep[train]")
    if wrong:
        raise ValueError("; ".join(wrong))
    engine_config(config)
    load_reward(config.reward)
    model_spec(config)
    task = build_task(config)
    tokenizer, max_model_len = _tokenizer_and_context(config)
    check_lengths(task.all_known, tokenizer, config.rollout.max_new_tokens, max_model_len)


def _tokenizer_and_context(config: JobConfig) -> tuple[PreTrainedTokenizerBase, int]:
    path = config.model.path
    if not path:
        return build_tokenizer(), CONTEXT_TOKENS
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ValueError(f"model.path: {path!r} is no model folder, it holds no config.json")
    return AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path).max_position_embeddings


def describe_plan(config: JobConfig, num_ranks: int) -> str:
    """The plan in a few lines: ranks, batch, memory per rank. Builds the model without its memory."""
    with torch.device("meta"):
        if config.model.path:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.path))
        else:
            model = build_model(model_spec(config), build_tokenizer())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    itemsize = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    weights = num_parameters * itemsize
    text = model.config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * itemsize
    rows = min(config.train.microbatch_tokens, 10**9)
    # Residual stream, attention and MLP of each layer are kept for the backward pass, then the logits in float32.
    per_layer = (10 * text.hidden_size + 3 * text.intermediate_size) * itemsize
    activations = rows * (text.num_hidden_layers * per_layer + 3 * text.vocab_size * 4)
    prompts, group = config.rollout.prompts_per_step, config.rollout.group_size
    mib = 2.0**20
    lines = [
        f"model      {config.model.path or 'built'}: {num_parameters / 1e6:.2f} M parameters, {config.model.dtype}",
        f"ranks      {num_ranks}, each a DDP trainer and an engine that aliases its weights",
        f"batch      {prompts} prompts x {group} samples a step, {prompts // num_ranks} x {group} a rank, "
        f"up to {config.rollout.max_new_tokens} new tokens each",
        f"steps      {config.run.num_steps}, {config.train.epochs_per_step} optimizer step(s) on each",
        f"memory     per rank: weights {weights / mib:.1f} MiB + gradients {weights / mib:.1f} MiB + AdamW "
        f"{2 * weights / mib:.1f} MiB; activations about {activations / mib:.0f} MiB for {rows} rows; KV pool "
        f"{config.engine.kv_cache} at {kv_per_token} bytes a token, released while training",
        f"results    {config.folder}",
    ]
    return "\n".join(lines)
