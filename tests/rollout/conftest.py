"""Fixtures of engines. They import what they need when they are used: many tests here need no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lockstep.rollout.config import EngineConfig
    from lockstep.rollout.loop.core import EngineCore
    from lockstep.tests.support.staged_runner import StagedRunner


@pytest.fixture
def in_stages(monkeypatch) -> Callable[[int], None]:
    """in_stages(2): engines that are made from now on run their steps in two stages, each a thread of this process.

    One stage is an engine's own way. The runner is `engine._core._runner`.
    """
    from lockstep.rollout.loop.core import EngineCore
    from lockstep.tests.support.staged_runner import StagedRunner

    own = EngineCore._make_runner

    def use(num_stages: int) -> None:
        def make(core: EngineCore, config: EngineConfig) -> StagedRunner:
            return StagedRunner(core, config.block_size, num_stages)

        monkeypatch.setattr(EngineCore, "_make_runner", own if num_stages == 1 else make)

    return use
