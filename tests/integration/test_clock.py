"""A wall clock that jumps changes no answer and no deadline: every wait is measured by the monotonic clock."""

from __future__ import annotations

import itertools
import time

import pytest

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=12, sampling_seed=3, ignore_eos=True)
LONG_S = 600.0  # far longer than the test
PROMPT = list(range(1, 40))


@pytest.mark.parametrize("policy", ["fcfs", "edf", "lrs"])
def test_a_clock_that_jumps_by_years_moves_no_deadline(make_model, monkeypatch, policy):
    service = RolloutService(Engine(make_model("qwen2"), EngineConfig(kv_cache=32, max_num_seqs=4, policy=policy)))
    engine = service.engine
    [expected] = engine.generate([PROMPT], PARAMS)

    years, now = itertools.cycle((0.0, 1e9, -1e9)), time.time()
    monkeypatch.setattr(time, "time", lambda: now + next(years))
    monkeypatch.setattr(time, "time_ns", lambda: int((now + next(years)) * 1e9))
    with engine.model.rollout_phase():
        engine.start()
        pinned = engine.pin_prefix(PROMPT, owner="a", ttl_s=LONG_S).num_pinned
        assert pinned > 0
        service.pause_generation("retract", ttl=LONG_S, timeout_s=LONG_S)
        service.begin_weight_update(weight_version="5", lease_s=LONG_S)
        assert service.state()["weight_update"]["state"] == "open" and engine.is_paused
        service.abort_weight_update()
        assert 0 < service.pause_lease.seconds_left <= LONG_S
        service.continue_generation()
        [after] = engine.generate([PROMPT], PARAMS)
        assert (after.token_ids, after.logprobs) == (expected.token_ids, expected.logprobs)
        assert engine.pin_prefix(PROMPT, owner="a").num_pinned == pinned
        service.close()
