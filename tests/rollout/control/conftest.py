"""An engine for many calls at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine


@pytest.fixture
def engine(make_model, restore_threads) -> Iterator[Engine]:
    """Yield an engine in its rollout phase, without a thread of its own."""
    torch.set_num_threads(1)
    settings = EngineConfig(kv_cache="400 blocks", max_num_seqs=16, speculation="off")
    engine = Engine(make_model("qwen3"), settings)
    with engine.model.rollout_phase():
        yield engine
        engine.close()
