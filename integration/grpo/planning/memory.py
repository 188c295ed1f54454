"""The memory of one rank of a job, as far as its settings tell."""

from __future__ import annotations

import math

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ...ranks import Ranks
from ..settings.config import JobConfig
from ..training.trainer import make_backend
from .model_sizes import layer_configs, mlp_width
from .models import first_part, model_without_memory


def activations(config: JobConfig, text: PretrainedConfig, num_ranks: int) -> str:
    """Describe the memory of a micro-batch's activations. text: the decoder's configuration."""
    train, rollout = config.train, config.rollout
    if train.microbatch_bytes:
        return f"activations of a micro-batch up to {train.microbatch_bytes}, as measured at the start"
    rows, of_what = train.num_microbatch_rows, "rows"
    if rows is None:
        samples = -(-rollout.prompts_per_step * rollout.group_size // (num_ranks * train.minibatches_per_step))
        rows = -(-samples // train.gradient_accumulation_steps) * rollout.max_new_tokens
        of_what = "rows of new tokens"
    itemsize = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    # The backward pass keeps residual stream, attention and MLP of each layer, and the logits in float32.
    per_layer = [(10 * text.hidden_size + 3 * mlp_width(one)) * itemsize for one in layer_configs(text)]
    layers = sum(per_layer)
    if train.gradient_checkpointing:
        layers = len(per_layer) * text.hidden_size * itemsize + max(per_layer)
    size = min(rows, 10**9) * (layers + 3 * text.vocab_size * 4)
    return f"activations about {size / 2**20:.0f} MiB for {rows} {of_what}"


def weight_memory(config: JobConfig, model: PreTrainedModel, num_ranks: int) -> str:
    """Describe the memory of one rank for parameters, by kind."""
    num_parameters = num_in_engine = sum(parameter.numel() for parameter in model.parameters())
    if config.parallel.num_ranks > 1:
        part = first_part(config, model, num_ranks)
        names = {name for name, _ in part.module.named_parameters()}  # tied parameters counted once
        num_in_engine = sum(math.prod(part.division.shards[name].shape) for name in names)
    num_reference = num_parameters if config.train.kl_coefficient else 0
    if num_reference and config.train.reference:
        reference = model_without_memory(config, config.train.reference)
        num_reference = sum(parameter.numel() for parameter in reference.parameters())
    itemsize = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    weights, gradients = itemsize, 4  # gradients are summed in float32
    # Of weights, gradients and optimizer state, the last `num_sharded` are sharded.
    num_sharded = {"ddp": 0, "fsdp2": 3, "deepspeed": config.deepspeed.zero_stage}[config.trainer]
    shards = [num_ranks if kind >= 3 - num_sharded else 1 for kind in range(3)]
    adamw = 2 * 4  # moments in float32
    if config.model.dtype == "bfloat16" and config.train.low_precision == "masters":
        if config.trainer == "fsdp2":
            weights = 4  # the shards are the masters
        else:
            adamw += 4
    if config.trainer == "deepspeed":
        gradients = itemsize
        if config.deepspeed.zero_stage or config.model.dtype == "bfloat16":
            adamw = 3 * 4  # moments and a copy of the parameters, in float32
    if config.train.lora.rank:  # in float32 whatever the base's dtype is
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        sizes = {
            "weights": itemsize * (num_parameters - num_trained),
            "adapters, gradients and AdamW": 16 * num_trained,
        }
        sizes |= {"the KL reference": num_reference * itemsize} if num_reference and config.train.reference else {}
        return " + ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items())
    parts = {
        "weights": weights / shards[0],
        "gradients": gradients / shards[1],
        "AdamW": adamw / shards[2],
        "the engine's copy": 0
        if aliases(config) or config.engines == "separate"
        else itemsize * num_in_engine / num_parameters,
        "the KL reference": itemsize * num_reference / num_parameters,
    }
    return " + ".join(f"{name} {num_parameters * size / 2**20:.1f} MiB" for name, size in parts.items() if size)


def aliases(config: JobConfig) -> bool:
    """Return whether the engine has no weights of its own."""
    backend = make_backend(config, Ranks(0, 1, torch.device("cpu")))
    return config.sync == "in_place" and config.parallel.num_ranks == 1 and backend.shares_storage
