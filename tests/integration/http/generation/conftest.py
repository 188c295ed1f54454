"""The service of modules that need a tokenizer and a context of a few hundred tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.random_models import random_model


@pytest.fixture(scope="module")
def small_service() -> Iterator[RolloutService]:
    torch.set_num_threads(1)
    model = random_model("qwen3", vocab_size=128, max_position_embeddings=512)
    service = RolloutService(Engine(model, EngineConfig(kv_cache=128), tokenizer=build_tokenizer()))
    with service.rollout():
        yield service
        service.engine.stop()
