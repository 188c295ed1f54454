"""Fixtures of engines. They import their modules when they are used: many tests here need no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lockstep.rollout.loop.parts import MakeRunner


@pytest.fixture
def in_stages() -> Callable[[int], MakeRunner]:
    """Return a function of the number of stages, for Engine(..., make_runner=in_stages(2)).

    Each stage is a thread of this process; with one stage the engine has its normal runner. The runner is
    `engine.parts.runner`.
    """
    from lockstep.rollout.loop.assemble import make_runner
    from lockstep.tests.support.staged_runner import StagedRunner

    def runner_of(num_stages: int) -> MakeRunner:
        return make_runner if num_stages == 1 else lambda parts: StagedRunner(parts, num_stages)

    return runner_of
