"""Prompts as JSON, for the rank that generates for several: a processor's tensors as safetensors in base64."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch

from ....rollout.control.desk.intake import Prompt

_TENSORS = "tensors"


def as_json(prompt: Prompt) -> Any:
    """Return a text or token ids as they are, and what a processor made of a text and its images as its tensors."""
    if not isinstance(prompt, Mapping):
        return prompt
    tensors = {name: torch.as_tensor(value).contiguous() for name, value in prompt.items()}
    return {_TENSORS: b64encode(safetensors.torch.save(tensors)).decode()}


def from_json(plain: Any) -> Prompt:
    """Return the prompt of `as_json`."""
    if not isinstance(plain, Mapping):
        return plain
    return safetensors.torch.load(b64decode(plain[_TENSORS]))
