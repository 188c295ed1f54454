"""Tests of the recorder of profiles: which threads it records, and other threads that run operations meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lockstep.integration.http.admin.recorder import Profiler
from lockstep.integration.http.edge.errors import HttpError
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=3, ignore_eos=True)
STORM = "lockstep.tests.integration.http.admin.profile_storm"
STORM_S = 15.0  # a profile of all threads crashes a process within it


class Elsewhere(threading.Thread):
    """A thread that runs operations under a name of their own, each when it is told to."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.wanted, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        while True:
            self.wanted.acquire()
            with torch.profiler.record_function("elsewhere"):
                torch.ones(3) + 1
            self.done.release()

    def compute(self) -> None:
        self.wanted.release()
        self.done.acquire()


@pytest.mark.parametrize("overlap", [False, True])
def test_only_the_thread_that_runs_the_model_is_recorded(make_model, tmp_path, overlap):
    """torch crashes where a profile of all threads begins or ends while another one runs operations."""
    engine, elsewhere = Engine(make_model("qwen2"), EngineConfig(kv_cache=64, overlap=overlap)), Elsewhere()
    elsewhere.start()
    elsewhere.compute()
    with engine.model.rollout_phase():
        engine.start()
        profiler = Profiler(engine)
        for name in ("first", "again"):
            profiler.start(str(tmp_path), ["CPU"], profile_id=name)
            elsewhere.compute()
            engine.generate([[5, 6, 7]], PARAMS)
            elsewhere.compute()
            events = json.loads(profiler.stop().read_text())["traceEvents"]
            operations = [event for event in events if str(event.get("name")).startswith("aten::")]
            assert len({event["tid"] for event in operations}) == 1
            assert "elsewhere" not in {event.get("name") for event in events}
        engine.stop()
    engine.close()


def test_a_profile_begins_and_ends_while_no_step_can_run(make_model, tmp_path):
    engine = Engine(make_model("qwen2"), EngineConfig(kv_cache=64))
    with engine.model.rollout_phase():
        engine.start()
    profiler = Profiler(engine)  # the rollout phase is over
    profiler.start(str(tmp_path), ["CPU"])
    assert profiler.stop().is_file()
    engine.pause_generation("in_place")
    profiler.start(str(tmp_path), ["CPU"])
    assert profiler.stop().is_file()
    with pytest.raises(HttpError, match="no profile"):
        profiler.stop()
    engine.stop()
    profiler.start(str(tmp_path), ["CPU"])  # without the loop's thread: in this one
    with engine.model.rollout_phase():
        engine.continue_generation()
        engine.generate([[5, 6, 7]], PARAMS)
    events = json.loads(profiler.stop().read_text())["traceEvents"]
    assert any(str(event.get("name")).startswith("aten::") for event in events)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["overlap", pytest.param("in the loop", marks=pytest.mark.exhaustive)])
def test_profiles_begin_and_end_beside_threads_that_run_operations(tmp_path: Path, overlap):
    command = [sys.executable, "-m", STORM, str(STORM_S), overlap, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STORM_S + 120)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert int(done.stdout.split()[-1]) > 5
