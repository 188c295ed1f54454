"""The tensors of verl's trainer as an engine takes them: in its dtype, and each once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig


@dataclass(frozen=True)
class Outgoing:
    """How the tensors of a model leave the trainer."""

    dtype: torch.dtype  # of the engine
    kept: Mapping[str, torch.dtype]  # buffers for which the model's class chooses a dtype of its own
    tied: frozenset[str]  # further names of parameters, whose bytes go once

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> Outgoing:
        """Look at the model of a configuration, without its weights."""
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        names = {name for name, _ in module.named_parameters()}
        every_name = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        kept = {name: buffer.dtype for name, buffer in module.named_buffers() if buffer.dtype != dtype}
        return cls(dtype, kept, frozenset(every_name - names))

    def tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Draw the weights one by one, and yield those that are sent."""
        for name, tensor in weights:
            if name in self.tied:
                continue
            dtype = self.kept.get(name, self.dtype)
            yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
