"""Tests of groups under random schedules: `integration/bench/parts/chaos.py`, which `lockstep bench sync --chaos` also
runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

from lockstep.integration.bench.parts import chaos
from lockstep.integration.bench.parts.chaos import Forked, RankSchedule, Round, Schedule, draw_schedule, run_chaos


def check(result: dict[str, object], num_schedules: int) -> None:
    assert not result["wrong"], "\n".join(f"seed {one['seed']}: {one['why']}" for one in result["wrong"])  # type: ignore[attr-defined]
    assert result["num_hangs"] == 0, f"seeds of schedules that hang: {result['hangs']}"
    assert result["num_completed"] + result["num_failed_cleanly"] == num_schedules == result["num_schedules"]  # type: ignore[operator]
    assert result["num_completed"] >= num_schedules // 5 and result["num_failed_cleanly"] >= num_schedules // 10


def test_ten_random_schedules_end_and_tear_nothing() -> None:
    check(run_chaos(10, seed=7), 10)


@pytest.mark.slow
def test_a_hundred_random_schedules_end_and_tear_nothing(record_property: Callable[[str, object], None]) -> None:
    result = run_chaos(100, seed=100)
    record_property("figures", result)
    check(result, 100)


def test_a_schedule_follows_from_its_seed_and_every_fault_comes_up() -> None:
    assert draw_schedule(5) == draw_schedule(5) != draw_schedule(6)
    kinds = {fault.split()[0] for seed in range(200) for fault in draw_schedule(seed).faults}
    assert kinds == {"kill", "stop", "size", "twice", "absent", "destroy", "plan"}


def one_rank(seed: int) -> Schedule:
    return Schedule(seed, [RankSchedule([Round(0.0, [], 1, 0)])])


def test_a_process_that_hangs_is_killed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "draw_schedule", one_rank)
    monkeypatch.setattr(chaos, "GRACE_S", -1.0)
    monkeypatch.setattr(chaos, "_run_rank", lambda *_: threading.Event().wait())
    result = run_chaos(2, seed=3)
    assert result["num_hangs"] == 2 and result["hangs"] == [3, 4] and result["num_completed"] == 0


@pytest.mark.parametrize("how", ["torn", "dies"])
def test_a_process_that_finds_torn_tensors_or_dies_of_itself_is_told_with_its_seed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(*_: object) -> list[str]:
        assert how != "torn", "a failed update left something"
        os.write(2, b"its last words")
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    monkeypatch.setattr(chaos, "draw_schedule", one_rank)
    monkeypatch.setattr(chaos, "_run_rank", rank)
    result = run_chaos(1, seed=9)
    (wrong,) = result["wrong"]  # type: ignore[misc]
    assert wrong["seed"] == 9 and ("left something" if how == "torn" else "its last words") in wrong["why"]
    assert result["num_completed"] == result["num_failed_cleanly"] == result["num_hangs"] == 0


def test_a_fork_gives_its_result_its_error_or_nothing() -> None:
    endless = threading.Event()
    forks = [Forked(lambda: torch.ones(3).sum().item()), Forked(lambda: 1 / 0), Forked(endless.wait)]
    assert forks[0].wait(10) and forks[0].finished and forks[0].result == 3.0
    assert forks[1].wait(10) and "ZeroDivisionError" in str(forks[1].error)
    assert not forks[2].wait(0.1)
    forks[2].signal(signal.SIGKILL)
    assert forks[2].wait(10) and not forks[2].finished and forks[2].error is None
    for fork in forks:
        fork.end()
