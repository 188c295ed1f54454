"""Tests of a benchmark's budget: rounds end in time, one is measured in any case, and all options are there."""

from __future__ import annotations

import argparse

import pytest

from lockstep.integration.bench.parts.budget import MAX_SECONDS, Budget
from lockstep.integration.cli.bench import BENCHMARKS, module_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rounds_of(seconds: float, each: list[float], *, least: int = 1) -> list[int]:
    """Run rounds that take these seconds; returns those that were begun."""
    clock = Clock()
    begun = []
    for index in Budget(seconds, clock).rounds(len(each), least=least):
        begun.append(index)
        clock.now += each[index]
    return begun


def test_rounds_go_on_while_the_longest_one_so_far_fits_again(capsys):
    assert rounds_of(10, [3, 3, 3, 3]) == [0, 1, 2]
    assert "no time for more than 3 of 4 rounds" in capsys.readouterr().err
    assert rounds_of(12, [3, 3, 3, 3]) == [0, 1, 2, 3]
    assert rounds_of(10, [1, 6, 1, 1]) == [0, 1]  # a third might take six seconds again
    assert rounds_of(100, [1, 1]) == [0, 1] and capsys.readouterr().err.count("no time") == 1


def test_the_least_rounds_are_run_whatever_they_take():
    assert rounds_of(1, [50, 50, 50]) == [0]
    assert rounds_of(1, [50, 50, 50], least=2) == [0, 1]
    assert rounds_of(0, [0, 0]) == [0, 1]


def test_a_share_is_of_what_is_left_and_counts_from_now():
    clock = Clock()
    budget = Budget(100, clock)
    clock.now += 60
    share = budget.share(0.25)
    assert share.left == 10
    clock.now += 50
    assert budget.left == -10 and budget.share(0.5).left == 0


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"gpu", "pipeline"}))
def test_every_benchmark_of_a_cpu_ends_within_five_minutes_as_it_is_called_by_default(name):
    parser = argparse.ArgumentParser()
    module_of(name).add_arguments(parser)
    assert MAX_SECONDS <= parser.parse_args([]).max_seconds <= 280
