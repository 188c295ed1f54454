"""The models that benchmarks run on: random weights from a fixed seed, or a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

_SEED = 0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Widths of Qwen3 models, of a mixture of experts and of a Qwen3.5. The head is the embedding, so the parameters of the
# vocabulary count once.
PRESETS: dict[str, dict[str, int]] = {
    "tiny": {  # 7.3 M parameters
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 16384,
    },
    "small": {  # 95 M parameters
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 16384,
    },
    "medium": {  # 348 M parameters: the layers of Qwen3-0.6B, 20 of its 28, and a smaller vocabulary
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
    },
}
PRESETS["small-moe"] = PRESETS["small"] | {  # 286 M parameters, of which 95 M compute a token, as in "small"
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1152,
}
PRESETS["small-qwen3.5"] = PRESETS["small"] | {  # 136 M parameters: gated delta nets in three of four layers
    "full_attention_interval": 4,
    "linear_num_key_heads": 12,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def load_model(name: str, *, dtype: str = "bfloat16", device: str = "cpu") -> PreTrainedModel:
    """Load the preset of that name, or the causal LM in that folder, in eval mode without gradients.

    Raises ValueError for a name that is neither.
    """
    model: PreTrainedModel
    if name in PRESETS:
        is_recurrent = "full_attention_interval" in PRESETS[name]
        make = random_recurrent_model if is_recurrent else random_model
        model = make(PRESETS[name], tie_word_embeddings=True)
        cast_parameters(model, DTYPES[dtype])
    elif (Path(name) / "config.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype])
    else:
        raise ValueError(f"--model {name!r} is neither {' nor '.join(PRESETS)} nor a folder with a config.json")
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of `to` has no `self` in its types
    return model.eval().requires_grad_(False)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the parameters, as loading in that dtype does. `model.to(dtype)` rounds the rotary frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def random_model(
    widths: Mapping[str, Any], *, tie_word_embeddings: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """Make a Qwen3 model of these widths, with experts if they name any, and with random weights drawn on the device in
    the dtype, from a fixed seed.

    A model drawn as float32 on the CPU has the same numbers after it moves to any device or dtype.
    Matrices are drawn with a standard deviation of in_features ** -0.5, which keeps the size of their inputs; the
    embedding, which is the head too, with hidden_size ** -0.5: after the last norm a logit has a standard deviation of
    about 1, like the logits of a barely trained model. Nothing overflows, no token is likely, and greedy choices are
    not ties.
    """
    kind: Any = Qwen3MoeForCausalLM if "num_experts" in widths else Qwen3ForCausalLM
    config = kind.config_class(
        **widths,
        tie_word_embeddings=tie_word_embeddings,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model: Qwen3ForCausalLM | Qwen3MoeForCausalLM = kind(config)
    cast_parameters(model, dtype)
    model.to_empty(device=device)
    # The constructor computes rotary tables as buffers, but not on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0)  # norms
    return model


def random_recurrent_model(widths: Mapping[str, Any], *, tie_word_embeddings: bool) -> Qwen3_5ForCausalLM:
    """Make a Qwen3.5 model of these widths, float32 on the CPU: matrices as in `random_model`, the rest as
    transformers initialises it."""
    config = Qwen3_5TextConfig(
        **widths,
        tie_word_embeddings=tie_word_embeddings,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        model = Qwen3_5ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def save_llama(folder: Path, widths: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Write a Llama model of these widths, tied, with random weights as transformers initialises them, to a folder."""
    config = LlamaConfig(**widths, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config)
    cast_parameters(model, dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
