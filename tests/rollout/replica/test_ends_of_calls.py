"""Tests of calls and engines of a replica that end in order, and of dismissals that come early."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.kernels.machine.running_time import running_time
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import EngineStopped, RankFailure
from lockstep.rollout.ranks.mesh import Mesh
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.forked_ranks import run_survivors

TIMEOUT_S = 5.0  # of ranks
PARAMS = SamplingParams(max_new_tokens=3, ignore_eos=True)
MakeModel = Callable[..., PreTrainedModel]
RunWorld = Callable[..., list[object]]
PATIENCE = 60.0


def make_engine(model: PreTrainedModel, tp: int = 1, pp: int = 2, mesh: Mesh | None = None) -> Engine:
    config = EngineConfig(tp=tp, pp=pp, k_blocks=2, kv_cache=32, max_model_len=128, rank_timeout_s=TIMEOUT_S)
    return Engine(model, config, mesh=mesh)


def ends_of(engine: Engine) -> list[str]:
    """Return how further calls of a follower end whose engine is closed."""
    errors = []
    for _ in range(2):
        with pytest.raises(EngineStopped) as stopped:
            engine.generate(None)
        errors.append(str(stopped.value))
    return [*errors, engine.follow()]


CLOSED = ["the controller has closed the engine: make another one"] * 2 + ["closed"]


def test_a_follower_that_generates_with_a_closed_engine_is_told_so(make_model: MakeModel, run_world: RunWorld) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model)
        engine.generate([[5, 6, 7]] if engine.is_controller else None, PARAMS)
        if engine.is_controller:
            engine.close()
            return CLOSED
        ends = ends_of(engine)
        engine.close()
        return ends

    assert run_world(2, rank) == [CLOSED] * 2


def test_a_controller_that_closes_and_ends_while_a_follower_is_away_is_no_loss(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model)
        engine.generate([[5, 6, 7]] if engine.is_controller else None, PARAMS)
        if engine.is_controller:
            engine.close()
            return None
        engine.ranks.watch._thread.join(PATIENCE)  # which notices the end of the controller's process
        ends = ends_of(engine)
        engine.close()
        return ends, caplog.text

    results = run_survivors(2, tmp_path, rank, victim=-1)
    assert results[1][0] == CLOSED
    assert "lost" not in results[1][1]


def test_a_follower_that_is_dismissed_before_it_follows_leaves_when_it_does(
    make_model: MakeModel, run_world: RunWorld
) -> None:
    """A call that all ranks make in between is another one; the next time it stays until it is dismissed again."""
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model)
        if engine.is_controller:
            engine.dismiss()
            dist.barrier()
            answers = [engine.generate([[5, 6, 7]], PARAMS) for _ in range(2)]  # in a call, and served
            engine.dismiss()
            ends = ["call over"] * 2 + ["closed"]
        else:
            dist.barrier()
            answers = [engine.generate(None)]
            ends = [engine.follow() for _ in range(3)]
        engine.close()
        return ends, len(answers[0])

    assert run_world(2, rank) == [(["call over"] * 2 + ["closed"], 1)] * 2


def num_open() -> tuple[int, int]:
    """Return the numbers of this process's descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_an_engine_that_is_closed_leaves_no_descriptor_and_no_thread(
    make_model: MakeModel, run_world: RunWorld, tp: int, pp: int
) -> None:
    model = make_model("llama")

    def use() -> None:
        engine = make_engine(model, tp, pp)
        engine.generate([[5, 6, 7]] if engine.is_controller else None, PARAMS)
        engine.close()

    def rank(rank: int) -> object:
        dist.barrier()  # the default group has its connections and threads
        running_time()  # and the process the thread of its clock
        num_threads = num_open()[1]
        use()
        gc.collect()
        before = num_open()  # the first engine opens some files for the process
        assert before[1] == num_threads
        for _ in range(5):
            use()
        gc.collect()
        assert num_open() == before
        return True

    assert all(run_world(tp * pp, rank))


def test_a_mesh_of_the_callers_outlives_its_engines(make_model: MakeModel, run_world: RunWorld) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        mesh, answers = Mesh.build(2, 1), []
        for _ in range(2):
            engine = make_engine(model, 2, 1, mesh)
            answers.append(engine.generate([[5, 6, 7]] if engine.is_controller else None, PARAMS)[0].token_ids)
            engine.close()
        return answers

    (first, second), others = run_world(2, rank)
    assert first == second and others == [first, second]


@pytest.mark.parametrize("kind", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_engine_whose_rank_is_lost_is_closed_without_waiting_for_it(
    make_model: MakeModel, tmp_path: Path, kind: signal.Signals
) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model, 2, 1)
        engine.generate([[5, 6, 7]] if engine.is_controller else None, PARAMS)
        if rank == 1:
            os.kill(os.getpid(), kind)
            threading.Event().wait()
        with pytest.raises(RankFailure):
            engine.generate([[5, 6, 7]], PARAMS)
        began = time.monotonic()
        engine.close()
        return time.monotonic() - began

    assert run_survivors(2, tmp_path, rank, victim=1)[0] < TIMEOUT_S
