"""Tests of ranks that end, stop, hang or fail: the call ends on all ranks of the replica, and all name the rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.kernels.collectives.exchange import SOURCE
from lockstep.kernels.machine import native
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import RankFailure
from lockstep.rollout.ranks.mesh import Mesh
from lockstep.rollout.ranks.opening import open_channel
from lockstep.rollout.ranks.wire import Kind
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.forked_ranks import run_survivors

TIMEOUT_S = 5.0  # of ranks
MakeModel = Callable[..., PreTrainedModel]
Until = Callable[..., None]
ENDLESS = SamplingParams(max_new_tokens=100_000, ignore_eos=True)


def make_engine(model: PreTrainedModel, shape: tuple[int, int]) -> Engine:
    tp, pp = shape
    return Engine(
        model, EngineConfig(tp=tp, pp=pp, k_blocks=2, kv_cache=256, max_model_len=512, rank_timeout_s=TIMEOUT_S)
    )


def generate_until_lost(engine: Engine) -> tuple[RankFailure, float]:
    """Generate again and again; returns the error that ended it, and the time."""
    while True:
        try:
            engine.generate([[5, 6, 7]] * 4 if engine.is_controller else None, ENDLESS)
        except RankFailure as failure:
            return failure, time.monotonic()


def check(results: dict[int, object], victim: int) -> None:
    for rank, result in results.items():
        assert isinstance(result, tuple), f"rank {rank}: {result!r}"
        failure = result[0]
        assert failure.ranks == (victim,), f"rank {rank}: {failure}"
        assert f"rank {victim} (stage" in str(failure) and failure.phase


CASES = [
    pytest.param((1, 2), 1, signal.SIGKILL, id="second-stage-killed"),
    pytest.param((1, 2), 1, signal.SIGSTOP, marks=pytest.mark.slow, id="second-stage-stopped"),
    pytest.param((1, 2), 0, signal.SIGKILL, marks=pytest.mark.slow, id="controller-killed"),
    pytest.param((1, 2), 0, signal.SIGSTOP, marks=pytest.mark.slow, id="controller-stopped"),
    pytest.param((2, 1), 1, signal.SIGKILL, marks=pytest.mark.slow, id="tp-rank-killed"),
    pytest.param((2, 1), 1, signal.SIGSTOP, marks=pytest.mark.slow, id="tp-rank-stopped"),
    *(
        pytest.param((2, 2), victim, kind, marks=marks, id=f"rank-{victim}-of-4-{kind.name}")
        for victim in range(4)
        for kind, marks in (  # in turn: of each rank one
            (signal.SIGKILL, pytest.mark.exhaustive if victim % 2 else pytest.mark.slow),
            (signal.SIGSTOP, pytest.mark.slow if victim % 2 else pytest.mark.exhaustive),
        )
    ),
]


@pytest.mark.parametrize(("shape", "victim", "kind"), CASES)
def test_a_rank_lost_in_generation_is_named_by_all(
    make_model: MakeModel, tmp_path: Path, until: Until, shape: tuple[int, int], victim: int, kind: signal.Signals
) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model, shape)

        def die() -> None:
            until(lambda: engine.parts.runner.stage.num_forwards > 5)
            os.kill(os.getpid(), kind)

        if rank == victim:
            threading.Thread(target=die, daemon=True).start()
        return generate_until_lost(engine)

    check(run_survivors(shape[0] * shape[1], tmp_path, rank, victim), victim)


@pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2, 1), signal.SIGKILL),
        pytest.param((2, 1), signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param((1, 2), signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_rank_lost_while_steps_are_replayed_is_named(
    make_model: MakeModel, tmp_path: Path, until: Until, shape: tuple[int, int], kind: signal.Signals
) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model, shape)
        stage = engine.parts.runner.stage
        assert (stage.mesh.tp_memory is not None) == (shape[0] > 1)

        def die() -> None:
            until(lambda: any(step.is_trusted for step in list(stage._graphs._records.values())))
            os.kill(os.getpid(), kind)

        if rank == 1:
            threading.Thread(target=die, daemon=True).start()
        return generate_until_lost(engine)

    check(run_survivors(2, tmp_path, rank, victim=1), 1)


class ClosedAtTheSixth:
    """A group of two stages whose connection breaks at a send, before any rank knows that the other has ended."""

    def __init__(self, group: dist.ProcessGroup, broken: Path) -> None:
        self._group, self._broken, self._num_sent = group, broken, 0

    def send(self, *arguments: object) -> dist.Work:
        self._num_sent += 1
        if self._num_sent < 6:
            return self._group.send(*arguments)
        self._broken.touch()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_a_stage_that_is_gone_when_its_hidden_states_are_sent_is_named(
    make_model: MakeModel, tmp_path: Path, until: Until
) -> None:
    model, broken = make_model("llama"), tmp_path / "broken"

    def rank(rank: int) -> object:
        engine = make_engine(model, (1, 2))
        stage = engine.parts.runner.stage

        def die() -> None:
            until(broken.exists)
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 1:
            threading.Thread(target=die, daemon=True).start()
        else:
            stage.mesh = replace(stage.mesh, stage_group=ClosedAtTheSixth(stage.mesh.stage_group, broken))
        return generate_until_lost(engine)

    check(run_survivors(2, tmp_path, rank, victim=1), 1)


@pytest.mark.parametrize(
    ("victim", "is_followed"), [pytest.param(0, False, marks=pytest.mark.slow), (1, False), (0, True)]
)
def test_a_rank_that_stopped_between_two_calls_is_missed_by_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, is_followed: bool
) -> None:
    """Check it in a vote, long before the vote's own deadline, and at a follower, which has no deadline."""
    launcher = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # outlives the ranks
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", str(launcher.port))):  # fmt: skip
        monkeypatch.setenv(name, value)

    def rank(rank: int) -> object:
        ranks = open_channel(Mesh.build(1, 2, timeout_s=60.0), 3.0)
        ranks.gather_json(None)
        if rank == victim:
            threading.Event().wait(1.0)  # until the others have read that it is away
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_followed:
            ranks.send(Kind.HERE)
            ranks.watch.enter("waiting for a step")
        with pytest.raises(RankFailure) as caught:
            ranks.next_message() if is_followed else ranks.gather_json(None, timeout_s=300.0)
        return caught.value, time.monotonic()

    results = run_survivors(2, tmp_path, rank, victim, timeout_s=60.0)
    check(results, victim)
    assert "gives no sign of life" in str(results[1 - victim][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "victim", "kind"),
    [
        ((1, 2), 0, signal.SIGKILL), ((1, 2), 0, signal.SIGSTOP), ((1, 2), 1, signal.SIGKILL),
        ((1, 2), 1, signal.SIGSTOP), ((2, 2), 2, signal.SIGSTOP),
        pytest.param((2, 2), 2, signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_a_rank_lost_while_paused_is_named_by_all(
    make_model: MakeModel, tmp_path: Path, until: Until, shape: tuple[int, int], victim: int, kind: signal.Signals
) -> None:
    model, paused = make_model("llama"), tmp_path / "paused"

    def rank(rank: int) -> object:
        engine = make_engine(model, shape)

        def pause() -> None:
            until(lambda: engine.parts.runner.stage.num_forwards > 5)
            engine.pause_generation("in_place")
            threading.Event().wait(TIMEOUT_S * 1.5)  # being paused for long is no failure
            assert engine.ranks.watch.failure is None
            paused.touch()

        def die() -> None:
            until(paused.exists)
            os.kill(os.getpid(), kind)

        if engine.is_controller:
            threading.Thread(target=pause, daemon=True).start()
        if rank == victim:
            threading.Thread(target=die, daemon=True).start()
        return generate_until_lost(engine)

    check(run_survivors(shape[0] * shape[1], tmp_path, rank, victim), victim)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "victim"), [((1, 2), 0), ((1, 2), 1), ((2, 1), 1), ((2, 2), 1), ((2, 2), 2)])
def test_a_rank_that_hangs_in_its_forward_is_named_by_the_others(
    make_model: MakeModel, tmp_path: Path, shape: tuple[int, int], victim: int
) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model, shape)

        def hang(*_: object) -> None:
            if engine.parts.runner.stage.num_forwards > 5:
                threading.Event().wait()

        if rank == victim:
            engine.model.module.base_model.register_forward_pre_hook(hang)
        return generate_until_lost(engine)

    check(run_survivors(shape[0] * shape[1], tmp_path, rank, victim), victim)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "victim"), [((2, 1), 0), ((2, 1), 1), ((2, 2), 1), ((2, 2), 2)])
def test_an_error_of_one_rank_of_a_stage_ends_the_replica_and_is_told(
    make_model: MakeModel, tmp_path: Path, shape: tuple[int, int], victim: int
) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model, shape)

        def fail(*_: object) -> None:
            if engine.parts.runner.stage.num_forwards > 5:
                raise ArithmeticError("boom")

        if rank == victim:
            engine.model.module.base_model.register_forward_pre_hook(fail)
        return generate_until_lost(engine)

    results = run_survivors(shape[0] * shape[1], tmp_path, rank, victim=-1)
    check(results, victim)
    assert all("ArithmeticError: boom" in str(failure) for failure, _ in results.values()), results


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_in_a_stage_of_one_rank_reaches_every_caller_and_the_replica_goes_on(
    make_model: MakeModel, tmp_path: Path, victim: int
) -> None:
    model = make_model("llama")
    params = SamplingParams(max_new_tokens=6, temperature=0.0)

    def rank(rank: int) -> object:
        engine = make_engine(model, (1, 2))
        prompts = [[5, 6, 7], [8, 9]] if engine.is_controller else None

        def fail(*_: object) -> None:
            if engine.parts.runner.stage.num_forwards == 3:
                engine.parts.runner.stage.num_forwards += 1
                raise RuntimeError("boom")

        if rank == victim:
            engine.model.module.base_model.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="boom") as caught:
            engine.generate(prompts, params)
        after = [c.token_ids for c in engine.generate(prompts, params)]
        engine.close()
        return str(caught.value), after

    results = run_survivors(2, tmp_path, rank, victim=-1)
    alone = [c.token_ids for c in Engine(model, EngineConfig(k_blocks=2)).generate([[5, 6, 7], [8, 9]], params)]
    for text, after in results.values():
        assert after == alone
        assert victim == 0 or "rank 1 (stage 1, tp 0)" in text


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "victim"), [((1, 2), 1), ((2, 1), 1)])
def test_a_rank_whose_state_differs_from_the_controllers_is_named(
    make_model: MakeModel, tmp_path: Path, shape: tuple[int, int], victim: int
) -> None:
    model = make_model("llama")

    def rank(rank: int) -> object:
        engine = make_engine(model, shape)

        def tamper(*_: object) -> None:
            stage = engine.parts.runner.stage
            if stage.num_forwards == 5:
                id = next(iter(stage.workers._sequences))
                stage.workers.sequence(id).num_prompt_tokens += 1

        if rank == victim:
            engine.model.module.base_model.register_forward_pre_hook(tamper)
        return generate_until_lost(engine)

    results = run_survivors(shape[0] * shape[1], tmp_path, rank, victim=-1)
    check(results, victim)
    assert all("has come apart from the controller" in str(failure) for failure, _ in results.values())
