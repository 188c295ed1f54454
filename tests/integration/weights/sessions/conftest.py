"""The service and the newer weights of the tests beside this file."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from torch import nn

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.weights.sessions.callers import later


@pytest.fixture
def service(model) -> Iterator[RolloutService]:
    config = EngineConfig(kv_cache="32 blocks", max_num_seqs=4)
    service = RolloutService(Engine(copy.deepcopy(model), config))
    with service.engine.model.rollout_phase():
        yield service
        service.close()


@pytest.fixture
def newer(model) -> nn.Module:
    """Make the trainer's model some steps later."""
    return later(model)
