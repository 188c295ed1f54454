"""The whole module of a configuration without memory, of the class with which transformers loads it."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' class that loads this model: of causal models, or of models of images and text, which run
    on text through their text model."""
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    if not is_causal and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def skeleton_of(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make the whole module on the meta device: it has no memory. Its types are those of `from_pretrained`, which keeps
    some tensors of some classes in float32."""
    with torch.device("meta"):
        module: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
        module.requires_grad_(False)
    wide = [re.compile(part.replace("*", ".*")) for part in module._keep_in_fp32_modules_strict or ()]
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and any(part.search(name) for part in wide):
            tensor.data = tensor.data.float()
    return module
