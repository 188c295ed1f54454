"""DDP on two ranks trains models of which a forward uses some parameters only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.ranks import Ranks
from lockstep.tests.support.forked_ranks import run_survivors

NUM_RANKS = 2
SETTINGS = TrainSettings(learning_rate=0.5, num_warmup_steps=0, weight_decay=0.0)


class Towers(nn.Module):
    """A decoder, and towers of which a batch uses those that it names."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("text", "images", "sounds", "nothing"):
            self.register_parameter(name, nn.Parameter(torch.ones(3, dtype=dtype)))

    def forward(self, names: tuple[str, ...]) -> Any:
        return CausalLMOutput(logits=torch.stack([getattr(self, name) for name in names]))


def trained(rank: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """Train two steps. Returns the gradients of each that are not zeros, averaged, by name and step."""
    ranks = Ranks(rank, NUM_RANKS, torch.device("cpu"))
    backend = DdpBackend(SETTINGS, ranks)
    model = Towers(dtype)
    backend.wrap(cast(Any, model))
    found = {}
    for step, turns in enumerate([[("text",), ("text",)], [("text", "images"), ("text",)]]):
        own = turns if rank == 0 else [("text", "sounds") if step else ("text",)]
        for index, names in enumerate(own):
            with backend.microbatch(is_last=index + 1 == len(own)):
                backend.backward(backend.forward(names=names).float().sum())
        taken = {name: backend.optimizer.sums.take(one) for name, one in model.named_parameters()}
        found |= {f"{name} {step}": one.tolist() for name, one in taken.items() if one is not None and one.any()}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_parameter_that_some_rank_or_none_uses_keeps_no_rank_waiting(tmp_path: Path, dtype: torch.dtype) -> None:
    told = run_survivors(NUM_RANKS, tmp_path, lambda rank: trained(rank, dtype), victim=-1, timeout_s=60)
    wanted = {"text 0": [1.5] * 3, "text 1": [1.5] * 3, "images 1": [0.5] * 3, "sounds 1": [0.5] * 3}
    assert told == {0: wanted, 1: wanted}
